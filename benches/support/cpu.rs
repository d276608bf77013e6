//! CPU time and memory of a process and its children, from `/proc`.

use std::fs;
use std::time::Duration;

/// Clock ticks per second of `/proc/*/stat`; 100 on every Linux there is.
const TICKS_PER_SECOND: u64 = 100;

/// Time on the CPU, in user and system mode, of the process and all below it.
pub fn time(process: u32) -> Duration {
    let ticks: u64 = family(process).into_iter().filter_map(ticks).sum();
    Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND)
}

/// Resident bytes of the process.
pub fn resident(process: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{process}/statm")).unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * 4096
}

fn family(process: u32) -> Vec<u32> {
    let mut found = vec![process];
    let mut next = 0;
    while next < found.len() {
        let path = format!("/proc/{0}/task/{0}/children", found[next]);
        let children = fs::read_to_string(path).unwrap_or_default();
        found.extend(children.split_whitespace().filter_map(|one| one.parse::<u32>().ok()));
        next += 1;
    }
    found
}

fn ticks(process: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in brackets may hold spaces; what follows does not.
    let rest = &text[text.rfind(')')? + 2..];
    let fields: Vec<&str> = rest.split(' ').collect();
    let user: u64 = fields.get(11)?.parse().ok()?;
    let system: u64 = fields.get(12)?.parse().ok()?;
    Some(user + system)
}
