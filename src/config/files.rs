//! The files a config stands on (itself, secrets, certificates), and whether their content is
//! still what it was. Content is compared by hash and never kept.
//! To have a file of a new kind looked at: its key in `FILE_KEYS`.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path as FilePath, PathBuf};

use super::fault::{Path, Step};
use super::load::CONFIG_BYTES_MAX;
use super::show::fnv;
use super::tree::Node;

/// Most files that are looked at besides the config itself. No fleet has more certificates.
pub const FILES_MAX: usize = 1024;

/// Keys whose value is the path of a file, and the sections in which they are such.
const FILE_KEYS: [&str; 4] = ["file", "certificate", "key", "ca"];
const FILE_SECTIONS: [&str; 3] = ["listen", "admin", "fleet"];

/// The files of a config, with a hash of each one's content as it was just before it was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    seen: BTreeMap<PathBuf, Option<u64>>,
}

impl Files {
    /// The config file alone, as it is now.
    pub(super) fn of(config: &FilePath) -> Self {
        let mut files = Self::default();
        files.add(config.to_owned());
        files
    }

    /// Adds every secret and certificate in the tree, whether or not the tree is a good config: a
    /// file that is missing now may come later.
    pub(super) fn add_named(&mut self, root: &Node) {
        for section in FILE_SECTIONS {
            if let Some(node) = root.at(&Path(vec![Step::Key(section.to_owned())])) {
                self.collect(node);
            }
        }
    }

    /// The paths, in order.
    pub fn paths(&self) -> impl Iterator<Item = &FilePath> {
        self.seen.keys().map(PathBuf::as_path)
    }

    /// Whether any content is another than when last seen, and what is seen now. One that cannot
    /// be read counts as what it was: it is being replaced, or the next load will say it is gone.
    pub(super) fn changed(&mut self) -> bool {
        let mut changed = false;
        for (path, known) in &mut self.seen {
            let hash = hash_of(path);
            if hash.is_some() && hash != *known {
                *known = hash;
                changed = true;
            }
        }
        changed
    }

    fn add(&mut self, path: PathBuf) {
        if self.seen.len() <= FILES_MAX && !self.seen.contains_key(&path) {
            let hash = hash_of(&path);
            self.seen.insert(path, hash);
        }
    }

    fn collect(&mut self, node: &Node) {
        match node {
            Node::List(items) => items.iter().for_each(|item| self.collect(item)),
            Node::Map(entries) => {
                for (key, value) in entries {
                    match value {
                        Node::Text(text) if FILE_KEYS.contains(&key.as_str()) => {
                            self.add(PathBuf::from(text));
                        }
                        _ => self.collect(value),
                    }
                }
            }
            _ => {}
        }
    }
}

/// A hash of the content. `None` for what is not a file that can be read twice, such as a pipe.
pub(super) fn hash_of(path: &FilePath) -> Option<u64> {
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let file = std::fs::File::open(path).ok()?;
    let mut content = Vec::new();
    file.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut content).ok()?;
    Some(fnv(&content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_secret_and_certificate_is_looked_at_and_no_log() {
        let text = "
listen: [{tls: {certificate: /c.crt, key: /c.key}}]
fleet: {replicas: [{api_key: {file: /a}, tls: {ca: /ca}}, {api_key: plain, extra: {file: /b}}]}
telemetry: {access_log: {path: /log, file: /log}}";
        let mut files = Files::default();
        files.add_named(&super::super::tree::read(text).unwrap());
        let paths: Vec<_> = files.paths().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/a", "/b", "/c.crt", "/c.key", "/ca"]);
    }

    #[test]
    fn only_another_content_is_a_change() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weir.yaml");
        let mut files = Files::of(&path);
        assert!(!files.changed(), "not there, still not there");
        std::fs::write(&path, "a").unwrap();
        assert!(files.changed());
        std::fs::write(&path, "a").unwrap();
        assert!(!files.changed());
        std::fs::remove_file(&path).unwrap();
        assert!(!files.changed(), "a file that is missing for a moment is no change");
        std::fs::write(&path, "b").unwrap();
        assert!(files.changed());
    }

    #[test]
    fn a_pipe_or_folder_is_left_alone() {
        assert_eq!(hash_of(FilePath::new("/dev/null")), None);
        assert_eq!(hash_of(FilePath::new("/")), None);
    }
}
