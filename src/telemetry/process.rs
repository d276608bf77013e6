//! The basics of this process, read from `/proc/self` at each scrape, under the names that
//! dashboards know from every other program. Nothing is kept between scrapes.
//! What the system does not tell (no `/proc`) is left out, never invented.
//! To add one: a reader that returns `Option`, and its line in `encode`.

use std::fmt::Write as _;
use std::fs;
use std::time::{Duration, SystemTime};

/// Ticks per second of the CPU times in `/proc`; Linux shows 100 to programs on every machine.
const TICKS_PER_SECOND: f64 = 100.0;

/// Adds the basics to `text`.
pub(super) fn encode(started: SystemTime, text: &mut String) {
    let since = started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let show = |text: &mut String, (name, kind, help): (&str, &str, &str), value: Option<f64>| {
        if let Some(value) = value {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        }
    };
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let cpu = ("process_cpu_seconds_total", "counter", "CPU time used, in seconds");
    show(text, cpu, cpu_seconds(&stat));
    let fds = ("process_open_fds", "gauge", "Open file descriptors");
    show(text, fds, open_fds());
    let fds_max = ("process_max_fds", "gauge", "The most file descriptors that may be open");
    show(text, fds_max, fds_max_of(&limits));
    let memory = ("process_resident_memory_bytes", "gauge", "Resident memory, in bytes");
    show(text, memory, resident_bytes(&status));
    let threads = ("process_threads", "gauge", "Threads of the process");
    show(text, threads, field(&status, "Threads:"));
    let start = ("process_start_time_seconds", "gauge", "When the process began, since 1970");
    show(text, start, Some(since.as_secs_f64()));
}

/// User and system time. The name of the program, in parentheses, may hold spaces itself, so
/// fields are counted from the last parenthesis: state is the first after it, utime the twelfth.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_ascii_whitespace().skip(11);
    let user: f64 = times.next()?.parse().ok()?;
    let system: f64 = times.next()?.parse().ok()?;
    Some((user + system) / TICKS_PER_SECOND)
}

/// The number after `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_ascii_whitespace().next()?.parse().ok()
}

fn resident_bytes(status: &str) -> Option<f64> {
    Some(field(status, "VmRSS:")? * 1024.0)
}

fn fds_max_of(limits: &str) -> Option<f64> {
    field(limits, "Max open files")
}

fn open_fds() -> Option<f64> {
    // The listing itself holds one open.
    let count = fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1);
    u32::try_from(count).ok().map(f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_spaces_and_parentheses_shifts_no_field() {
        let stat = "7 (a b) (c) S 1 7 7 0 -1 4194560 400 0 0 0 250 150 0 0 20 0 9 0 77 1 2 3";
        assert_eq!(cpu_seconds(stat), Some(4.0));
    }

    #[test]
    fn memory_is_told_in_bytes() {
        assert_eq!(resident_bytes("Name:\tweir\nVmRSS:\t  2048 kB\n"), Some(2_097_152.0));
    }

    #[test]
    fn the_soft_limit_of_files_is_the_one_told() {
        let limits = "Max open files            1024                 524288               files\n";
        assert_eq!(fds_max_of(limits), Some(1024.0));
        let unlimited = "Max open files            unlimited            unlimited      files\n";
        assert_eq!(fds_max_of(unlimited), None);
    }

    #[test]
    fn what_is_not_there_is_left_out() {
        assert_eq!(cpu_seconds(""), None);
        assert_eq!(resident_bytes("Name: weir\n"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_all_basics() {
        let mut text = String::new();
        encode(SystemTime::UNIX_EPOCH + Duration::from_secs(9), &mut text);
        for name in [
            "process_cpu_seconds_total ",
            "process_open_fds ",
            "process_resident_memory_bytes ",
            "process_threads ",
            "process_start_time_seconds 9\n",
        ] {
            assert!(text.contains(&format!("\n{name}")), "{name} is missing in {text}");
        }
    }
}
