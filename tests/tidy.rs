//! The house rules that a compiler does not know: floors, purity, headers, sizes, widths.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may")]

use std::fs;
use std::path::{Path, PathBuf};

/// The floors of the house, ground first. A room may name itself and any room on a lower floor.
const FLOORS: &[&[&str]] = &[
    &["names"],
    &["request", "admission", "routing", "telemetry", "clock"],
    &["fleet", "response", "batch", "simulated"],
    &["proxy"],
    &["config"],
    &["control"],
    &["admin"],
    &["server"],
    &["demo"],
    &["lib", "main"],
];

/// Rooms, or files of rooms, that only think.
const PURE: &[&str] = &[
    "src/names.rs",
    "src/request",
    "src/admission",
    "src/routing",
    "src/fleet/breaker",
    "src/fleet/health.rs",
    "src/fleet/url.rs",
    "src/fleet/models.rs",
    "src/proxy/retry.rs",
    "src/response/buffer.rs",
    "src/response/events.rs",
    "src/response/need.rs",
    "src/response/exchange.rs",
    "src/response/tap.rs",
    "src/response/progress.rs",
    "src/response/keys.rs",
    "src/simulated/engine.rs",
    "src/simulated/cache.rs",
    "src/simulated/counters.rs",
    "src/simulated/sequence.rs",
    "src/simulated/text.rs",
];

/// What a room that only thinks cannot name.
const IMPURE_WORDS: &[&str] = &[
    "pingora",
    "tokio::",
    "std::net::Tcp",
    "std::fs",
    "Instant::now",
    "SystemTime::now",
    "clock::",
    "fastrand::",
    ".await",
];

const LINES_MAX: usize = 600;
const COLUMNS_MAX: usize = 100;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

fn sources() -> Vec<(String, String)> {
    let mut files = Vec::new();
    rust_files(&root().join("src"), &mut files);
    // A file that is nothing but tests may do what tests may.
    files.retain(|path| !path.ends_with("laws.rs") && !path.iter().any(|part| part == "tests"));
    files.sort();
    files
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
            (name, fs::read_to_string(path).unwrap())
        })
        .collect()
}

/// The source without its tests, which may do what they like.
fn without_tests(text: &str) -> &str {
    text.find("#[cfg(test)]").map_or(text, |at| &text[..at])
}

fn room_of(file: &str) -> String {
    let inside = file.strip_prefix("src/").unwrap();
    inside.split(['/', '.']).next().unwrap().to_owned()
}

fn floor_of(room: &str) -> Option<usize> {
    FLOORS.iter().position(|rooms| rooms.contains(&room))
}

#[test]
fn every_room_stands_on_a_floor_and_looks_down_only() {
    let mut faults = Vec::new();
    for (file, text) in sources() {
        let room = room_of(&file);
        let Some(floor) = floor_of(&room) else {
            faults.push(format!("{file}: the room `{room}` stands on no floor"));
            continue;
        };
        for (number, line) in without_tests(&text).lines().enumerate() {
            if line.trim_start().starts_with("//") {
                continue;
            }
            for (at, _) in line.match_indices("crate::") {
                let named: String = line[at + "crate::".len()..]
                    .chars()
                    .take_while(|letter| letter.is_ascii_alphanumeric() || *letter == '_')
                    .collect();
                let Some(other) = floor_of(&named) else { continue };
                if named != room && floor <= other {
                    faults.push(format!("{file}:{}: `{room}` names `{named}`", number + 1));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn rooms_that_think_do_not_touch_the_world() {
    let mut faults = Vec::new();
    for (file, text) in sources() {
        if !PURE.iter().any(|pure| file == *pure || file.starts_with(&format!("{pure}/"))) {
            continue;
        }
        for (number, line) in without_tests(&text).lines().enumerate() {
            let code = line.split("//").next().unwrap();
            for word in IMPURE_WORDS {
                if code.contains(word) {
                    faults.push(format!("{file}:{}: `{word}` in a pure room", number + 1));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_file_says_what_lives_in_it_and_is_of_a_readable_size() {
    let mut faults = Vec::new();
    for (file, text) in sources() {
        if !text.starts_with("//!") {
            faults.push(format!("{file}: no `//!` header"));
        }
        let lines = text.lines().count();
        if LINES_MAX < lines {
            faults.push(format!("{file}: {lines} lines, the limit is {LINES_MAX}"));
        }
        for (number, line) in text.lines().enumerate() {
            if COLUMNS_MAX < line.chars().count() {
                faults.push(format!("{file}:{}: wider than {COLUMNS_MAX}", number + 1));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_policy_has_an_example() {
    for row in weir::routing::POLICIES {
        let text = fs::read_to_string(root().join(row.example))
            .unwrap_or_else(|error| panic!("{}: {error}", row.example));
        assert!(text.contains(row.name), "{} does not show `{}`", row.example, row.name);
    }
}

#[test]
fn nothing_is_left_to_do_in_the_tree() {
    for (file, text) in sources() {
        for mark in ["TODO", "FIXME", "XXX"] {
            assert!(!text.contains(mark), "{file}: {mark}");
        }
    }
}
