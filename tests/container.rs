//! What can be known of the container image where no container engine runs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may")]

use std::path::Path;
use std::process::Command;

/// What `debian:bookworm-slim` has without anything being installed: libc6 and libgcc-s1.
const IN_THE_IMAGE: [&str; 6] =
    ["linux-vdso.so", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux", "libpthread.so.0"];

fn dockerfile() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("Dockerfile");
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn everything_the_image_copies_is_in_the_tree() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = dockerfile();
    let copies = text.lines().filter_map(|line| line.strip_prefix("COPY "));
    let mut seen = 0;
    for copy in copies.filter(|copy| !copy.starts_with("--from")) {
        let paths: Vec<&str> = copy.split_whitespace().collect();
        for source in &paths[..paths.len() - 1] {
            assert!(root.join(source).exists(), "the Dockerfile copies `{source}`");
            seen += 1;
        }
    }
    assert!(5 < seen, "the Dockerfile copies the sources");
}

#[test]
fn the_image_runs_weir_as_nobody_in_particular_and_stops_it_in_good_order() {
    let text = dockerfile();
    for line in ["USER 65532:65532", "STOPSIGNAL SIGTERM", "ENTRYPOINT [\"weir\"]"] {
        assert!(text.lines().any(|one| one == line), "no line `{line}`");
    }
    assert!(text.contains("ca-certificates"), "without them the process does not start");
    assert!(text.contains("HEALTHCHECK"));
}

#[test]
fn the_binary_needs_no_library_that_the_image_lacks() {
    let Ok(listed) = Command::new("ldd").arg(env!("CARGO_BIN_EXE_weir")).output() else {
        println!("ldd is not here: the libraries were not looked at");
        return;
    };
    let text = String::from_utf8_lossy(&listed.stdout);
    let needed: Vec<&str> =
        text.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(!needed.is_empty(), "ldd told nothing");
    for library in needed {
        let known = IN_THE_IMAGE.iter().any(|one| library.contains(one));
        assert!(known, "`{library}` is not in the image");
    }
}
