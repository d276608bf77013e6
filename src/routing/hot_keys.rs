//! Which session keys are so busy that one replica cannot hold them. A bounded estimate: two rows
//! of counters, of which a key's smaller one is believed. No key is stored, and no time is needed:
//! all counts are halved each time enough requests have passed.

use std::sync::atomic::{AtomicU32, Ordering};

use super::hash::mix;

/// Counters in each of the two rows; a power of two. Both rows take 16 KiB.
const COUNTERS: usize = 2_048;
/// Requests after which all counts are halved: the span of the memory.
const HALVE_AFTER: u32 = 2_048;
/// Requests of one key below which it is never hot, however few the others are.
const EVIDENCE_MIN: u32 = 16;

#[derive(Debug)]
pub(in crate::routing) struct HotKeys {
    rows: [Box<[AtomicU32]>; 2],
    requests: AtomicU32,
}

impl Default for HotKeys {
    fn default() -> Self {
        let row = || (0..COUNTERS).map(|_| AtomicU32::new(0)).collect();
        Self { rows: [row(), row()], requests: AtomicU32::new(0) }
    }
}

impl HotKeys {
    /// Counts a request; `None` when it has no key, for it too is part of the load.
    pub(in crate::routing) fn count(&self, key: Option<u64>) {
        for counter in key.iter().flat_map(|key| self.counters(*key)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        // Exactly one of several threads sees the limit reached.
        if self.requests.fetch_add(1, Ordering::Relaxed) + 1 == HALVE_AFTER {
            self.halve();
        }
    }

    /// Whether the key makes more than one replica's due part of the latest requests.
    pub(in crate::routing) fn is_hot(&self, key: u64, replicas: u32) -> bool {
        let counts = self.counters(key).map(|counter| counter.load(Ordering::Relaxed));
        let count = counts.min().unwrap_or(0);
        let requests = u64::from(self.requests.load(Ordering::Relaxed));
        EVIDENCE_MIN <= count && requests < u64::from(count) * u64::from(replicas)
    }

    /// The key's counter in each row.
    fn counters(&self, key: u64) -> impl Iterator<Item = &AtomicU32> {
        let places = [key, mix(key)];
        self.rows.iter().zip(places).filter_map(|(row, place)| row.get(place as usize % COUNTERS))
    }

    /// Counts that come in between are halved or not; either is near enough.
    fn halve(&self) {
        for counter in self.rows.iter().flat_map(|row| row.iter()) {
            counter.store(counter.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
        }
        self.requests.fetch_sub(HALVE_AFTER / 2, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_hot_when_it_makes_more_than_one_replicas_part_and_cools_down() {
        let hot_keys = HotKeys::default();
        for number in 0..400_u64 {
            let key = if number % 5 < 3 { 7 } else { mix(number % 99 + 1_000) };
            hot_keys.count(Some(key));
        }
        assert!(hot_keys.is_hot(7, 4), "60 % of the requests is more than a quarter");
        assert!(!hot_keys.is_hot(7, 1), "one replica has no neighbour to help");
        assert!((0..99).all(|light| !hot_keys.is_hot(mix(light + 1_000), 4)));
        for number in 0..8 * u64::from(HALVE_AFTER) {
            hot_keys.count(Some(mix(number)));
        }
        assert!(!hot_keys.is_hot(7, 4), "what was hot long ago is forgotten");
    }

    #[test]
    fn a_few_requests_prove_nothing() {
        let hot_keys = HotKeys::default();
        (0..EVIDENCE_MIN - 1).for_each(|_| hot_keys.count(Some(7)));
        assert!(!hot_keys.is_hot(7, 4));
    }
}
