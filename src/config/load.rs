//! From a file to a checked config: text, tree, options, checks, in this order, faults from all
//! of them together.
//! What is right is decided by the rooms and in check.rs.

use std::io::Read;
use std::path::Path as FilePath;

use super::fault::Fault;
use super::files::Files;
use super::tree::{self, Node};
use super::{Config, check, read};

/// Largest config file, in bytes.
pub const CONFIG_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// A config as far as it could be read, and what there is to say about it.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The config, or everything that is wrong with it, in the order of the file.
    pub config: Result<Config, Vec<Fault>>,
    /// What is allowed and yet should not stay so. Empty where there are faults.
    pub warnings: Vec<Fault>,
    /// The files it stands on, for [`super::watch::Watch`]: itself, and the secrets and
    /// certificates it names, readable or not.
    pub files: Files,
}

impl Loaded {
    /// Reads and checks the file at `path` and the files it names.
    pub fn from_file(path: &FilePath) -> Self {
        // Before it is read: should it change in between, the watcher sees it differ.
        let files = Files::of(path);
        match read_bounded(path, CONFIG_BYTES_MAX) {
            Ok(text) => Self::examine(&text, files),
            Err(fault) => Self::refused(fault, files),
        }
    }

    /// The same for a text in memory.
    pub fn from_text(text: &str) -> Self {
        Self::examine(text, Files::default())
    }

    fn examine(text: &str, mut files: Files) -> Self {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut root = match tree::read(text) {
            Ok(Node::Null) => {
                let fault = Fault::new("", "the file is empty")
                    .advise("name at least one replica; conf/weir.yaml shows the smallest config");
                return Self::refused(fault, files);
            }
            Ok(root) => root,
            Err(fault) => return Self::refused(fault, files),
        };
        files.add_named(&root);
        let mut findings = read::Findings::default();
        let config: Option<Config> = read::read(&mut root, &mut findings);
        if let Some(config) = &config {
            check::faults(config, &root, &mut findings);
        }
        let clean = findings.is_clean();
        match config {
            Some(config) if clean => {
                let mut noted = read::Findings::default();
                check::warnings(&config, &mut noted);
                Self { config: Ok(config), warnings: with_lines(noted, text), files }
            }
            _ => Self {
                config: Err(with_lines(findings, text)),
                warnings: Vec::new(),
                files,
            },
        }
    }

    fn refused(fault: Fault, files: Files) -> Self {
        Self { config: Err(vec![fault]), warnings: Vec::new(), files }
    }
}

/// Reads a text file that has no business to be larger than `bytes_max`.
pub(super) fn read_bounded(path: &FilePath, bytes_max: u64) -> Result<String, Fault> {
    let refuse = |problem: String| Fault::new("", format!("`{}` {problem}", path.display()));
    let told = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => refuse("does not exist".to_owned())
            .advise("a path is taken as seen from the working directory"),
        std::io::ErrorKind::InvalidData => refuse("is not UTF-8 text".to_owned()),
        std::io::ErrorKind::IsADirectory => {
            refuse("is a directory".to_owned()).advise("name the file in it")
        }
        _ => refuse(format!("cannot be read: {error}")),
    };
    let file = std::fs::File::open(path).map_err(told)?;
    let mut text = String::new();
    file.take(bytes_max + 1).read_to_string(&mut text).map_err(told)?;
    match text.len() as u64 <= bytes_max {
        true => Ok(text),
        false => Err(refuse(format!("is larger than {bytes_max} bytes"))),
    }
}

fn with_lines(findings: read::Findings, text: &str) -> Vec<Fault> {
    let occurrences = findings.occurrences.clone();
    let mut faults = findings.into_faults();
    for (path, fault) in &mut faults {
        let occurrence = occurrences.get(path).copied().unwrap_or_default();
        fault.line = tree::line_of(text, path, occurrence);
    }
    faults.sort_by_key(|(_, fault)| fault.line);
    faults.into_iter().map(|(_, fault)| fault).collect()
}
