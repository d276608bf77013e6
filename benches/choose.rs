//! What a choice costs: each policy over 3, 10, 100 and 1,000 candidates.
//! To add a policy here, add it to the table `POLICIES`.
#![allow(missing_docs, reason = "the macros of criterion write public functions without docs")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

use weir::clock;
use weir::names::{ReplicaId, Tokens};
use weir::routing::{Candidate, Options, POLICIES, Question, choose, mix, stable_hash};

const COUNTS: [usize; 4] = [3, 10, 100, 1_000];

fn bench_choose(criterion: &mut Criterion) {
    let now = clock::now();
    for row in POLICIES {
        let mut group = criterion.benchmark_group(row.name);
        let Ok(policy) = (row.build)(&Options::default()) else { continue };
        for count in COUNTS {
            let ids: Vec<ReplicaId> =
                (0..count).map(|index| ReplicaId::new(format!("10.0.0.{index}:8000"))).collect();
            let candidates: Vec<Candidate<'_>> = ids
                .iter()
                .enumerate()
                .map(|(index, id)| Candidate {
                    id,
                    id_hash: stable_hash(id.as_str().as_bytes()),
                    weight: 1.0,
                    in_flight: (mix(index as u64) % 32) as u32,
                    waiting: None,
                })
                .collect();
            let mut rotation = 0_u64;
            group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
                bencher.iter(|| {
                    rotation += 1;
                    let question = Question {
                        session_key: Some(b"6f1c2a4e-3b7d-4c1a-9e55-0d2f7b8a9c10"),
                        tokens_estimated: Tokens(1_000),
                        dice: mix(rotation),
                        rotation,
                        now,
                    };
                    choose(&*policy, black_box(&question), black_box(&candidates))
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, bench_choose);
criterion_main!(benches);
