//! From a file to a checked config: text, tree, options, checks, in this order, faults from all
//! of them together.
//! What is right is decided by the rooms and in check.rs.

use std::io::Read;
use std::path::Path as FilePath;
use std::time::Duration;

use super::fault::Fault;
use super::files::Files;
use super::tree::{self, Node};
use super::{Config, check, read, show};

/// Largest config file, in bytes.
pub const CONFIG_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// How often a file that is being written is read anew, and the pause before each time.
const SETTLE_TRIES_MAX: u32 = 50;
const SETTLE_PAUSE: Duration = Duration::from_millis(10);

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
    /// The file says in so many words that there are no replicas: `replicas: []`.
    pub empty_on_purpose: bool,
}

impl Loaded {
    /// Reads and checks the file at `path` and the files it names.
    pub fn from_file(path: &FilePath) -> Self {
        // Before it is read: should it change in between, the watcher sees it differ.
        let files = Files::of(path);
        match read_settled(path, CONFIG_BYTES_MAX) {
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
        let empty_on_purpose = says_no_replicas(&root);
        let mut findings = read::Findings::default();
        let config: Option<Config> = read::read(&mut root, &mut findings);
        if let Some(config) = &config {
            check::faults(config, &root, &mut findings);
        }
        if !findings.is_clean() {
            findings.advise_unknown(show::place_of);
        }
        let clean = findings.is_clean();
        match config {
            Some(config) if clean => {
                let mut noted = read::Findings::default();
                check::warnings(&config, &mut noted);
                let warnings = with_lines(noted, text);
                Self { config: Ok(config), warnings, files, empty_on_purpose }
            }
            _ => Self {
                config: Err(with_lines(findings, text)),
                warnings: Vec::new(),
                files,
                empty_on_purpose,
            },
        }
    }

    fn refused(fault: Fault, files: Files) -> Self {
        Self { config: Err(vec![fault]), warnings: Vec::new(), files, empty_on_purpose: false }
    }
}

fn says_no_replicas(root: &Node) -> bool {
    fn value<'a>(node: &'a Node, key: &str) -> Option<&'a Node> {
        let Node::Map(entries) = node else { return None };
        entries.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }
    let replicas = value(root, "fleet").and_then(|fleet| value(fleet, "replicas"));
    matches!(replicas, Some(Node::List(items)) if items.is_empty())
}

/// Reads a file that somebody may be writing at this moment: half a config can be a good one. What
/// was read counts only if the file was as long as that, and unchanged, before and after.
fn read_settled(path: &FilePath, bytes_max: u64) -> Result<String, Fault> {
    let state = || {
        let about = std::fs::metadata(path).ok()?;
        Some((about.len(), about.modified().ok()))
    };
    if std::fs::metadata(path).is_ok_and(|about| !about.is_file()) {
        // A pipe has no length, and can be read once.
        return read_bounded(path, bytes_max);
    }
    for _ in 0..SETTLE_TRIES_MAX {
        let before = state();
        let text = read_bounded(path, bytes_max)?;
        let whole = before.is_some_and(|(length, _)| length == text.len() as u64);
        if whole && before == state() {
            return Ok(text);
        }
        std::thread::sleep(SETTLE_PAUSE);
    }
    let problem = format!("`{}` is being written all the time", path.display());
    Err(Fault::new("", problem).advise("write it beside and move it over"))
}

/// Reads a text file that has no business to be larger than `bytes_max`.
pub(super) fn read_bounded(path: &FilePath, bytes_max: u64) -> Result<String, Fault> {
    let refuse = |problem: String| Fault::new("", format!("`{}` {problem}", path.display()));
    let told = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound if path.is_absolute() => refuse("does not exist".to_owned()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every fault of a text, as `line path: problem; advice`.
    fn faults(text: &str) -> Vec<String> {
        let faults = Config::parse(text).err().unwrap_or_default();
        faults
            .iter()
            .map(|fault| {
                let line = fault.line.unwrap_or_default();
                let advice = fault.advice.as_deref().unwrap_or_default();
                format!("{line} {}: {}; {advice}", fault.path, fault.problem)
            })
            .collect()
    }

    /// The one fault of a text.
    fn fault(text: &str) -> String {
        let faults = faults(text);
        assert_eq!(faults.len(), 1, "{text}: {faults:?}");
        faults[0].clone()
    }

    #[test]
    fn an_empty_fleet_is_meant_only_where_it_is_written() {
        let meant = |text: &str| Loaded::from_text(text).empty_on_purpose;
        assert!(meant("fleet: {replicas: []}"));
        for text in ["listen: [{address: '127.0.0.1:151'}]", "fleet: {}", "fleet: {replicas: }"] {
            assert!(!meant(text), "{text}");
        }
    }

    #[test]
    fn the_smallest_config_is_one_replica() {
        let config = Config::parse("fleet: {replicas: [{url: 'http://a:8000'}]}").unwrap();
        assert_eq!(config.listen[0].address.to_string(), "0.0.0.0:8080");
        assert_eq!(config.fleet.replicas[0].url, "http://a:8000");
    }

    #[test]
    fn all_faults_are_told_at_once_each_in_its_place() {
        let text = "
listen:
  - address: localhost:8080
  - adress: 0.0.0.0:8081
fleet:
  replicas:
    - url: 10.0.0.1:8000
      weight: heavy
    - url: 'http://b:8000 '
    - urls: http://c
      url: http://c:8000
  prob: {}
routing: {policy: fastest}
proxy:
  timeouts: {connect: 5, total: soon}
request:
  body_bytes_max: 64
timeouts: {connect: 5s}
server:
  grace: 60s
  grace: 30s
";
        let expected = [
            "3 listen[0].address: a name where an IP address is due; write `127.0.0.1:8080`",
            "4 listen[1].adress: unknown key; did you mean `address`?",
            "7 fleet.replicas[0].url: no scheme; write `http://10.0.0.1:8000`",
            "8 fleet.replicas[0].weight: not a number; write a number",
            "9 fleet.replicas[1].url: white space around the URL; write `http://b:8000`",
            "10 fleet.replicas[2].urls: unknown key; did you mean `url`?",
            "12 fleet.prob: unknown key; did you mean `probe`?",
            "13 routing.policy: ",
            "15 proxy.timeouts.connect: not a duration; write the unit too: `5s`",
            "15 proxy.timeouts.total: not a duration; write a number with its unit",
            "17 request.body_bytes_max: not a size; write the unit too: `64MiB`",
            "18 timeouts: unknown key; it belongs elsewhere: `proxy.timeouts`",
            "21 server.grace: given a second time; keep one",
        ];
        let found = faults(text);
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "found {found}, expected {expected}");
        }
    }

    #[test]
    fn a_fault_does_not_move_the_places_of_others() {
        let text = "
fleet:
  replicas:
    - nothing
    - url: http://b:1
    - 7
    - url: ftp://c
";
        let found = faults(text);
        assert!(found[0].starts_with("4 fleet.replicas[0]: not a section"), "{found:?}");
        assert!(found[1].starts_with("6 fleet.replicas[2]: not a section"), "{found:?}");
        assert!(found[2].starts_with("7 fleet.replicas[3].url: unknown scheme"), "{found:?}");
    }

    #[test]
    fn a_file_without_content_is_refused() {
        for text in ["", "\n", "# a comment\n", "---\n", "~"] {
            assert!(
                fault(text).contains("the file is empty"),
                "an emptied file must change nothing"
            );
        }
    }

    #[test]
    fn a_section_without_content_is_the_default_one() {
        let text =
            "fleet:\n  replicas:\n  - url: http://a:1\n    models:\nrouting:\nproxy:\n  retry:\n";
        assert!(Config::parse(text).is_ok(), "a section whose lines are commented out is no fault");
    }

    #[test]
    fn a_value_of_the_wrong_kind_is_told_with_what_is_right() {
        for (text, told) in [
            ("listen: 8080", "1 listen: not a list"),
            ("fleet: []", "1 fleet: not a section"),
            ("[1, 2]", "0 : not a section"),
            ("listen: [{h2c: yes}]", "1 listen[0].h2c: neither `true` nor `false`; write `true`"),
            ("server: {threads: '4'}", "1 server.threads: not a whole number; write 4 without"),
            ("server: {threads: 70000}", "1 server.threads: out of range"),
            ("server: {threads: 0}", "1 server.threads: out of range"),
            ("server: {threads: 1.5}", "1 server.threads: not a whole number"),
            ("server: {grace: }", "1 server.grace: nothing is given"),
            ("server: !x {}", "1 server: "),
            ("request: {unknown_paths: pas}", "1 request.unknown_paths: not one of"),
            ("request: {upload_timeout: 0s}", "1 request.upload_timeout: this limit has no off"),
            ("request: {body_bytes_max: 12 apples}", "1 request.body_bytes_max: not a size"),
            ("admin: {address: 9090}", "1 admin.address: not an address"),
            ("fleet: {replicas: [{url: 'http://a', id: 7}]}", "1 fleet.replicas[0].id: not a text"),
            ("fleet: {aliases: [a, b]}", "1 fleet.aliases: not a section of `name: value`"),
        ] {
            let found = fault(text);
            assert!(found.starts_with(told), "{text}: {found}");
        }
        assert!(fault("request: {unknown_paths: pas}").contains("did you mean `pass`?"));
    }

    #[test]
    fn nothing_needs_no_unit() {
        let config = Config::parse("proxy: {timeouts: {total: 0}}").unwrap();
        assert!(config.proxy.timeouts.total.is_zero());
    }

    #[test]
    fn no_fault_shows_a_secret() {
        let text = "
fleet:
  api_key: {env: sk-secret-1}
  replicas:
    - {url: 'http://user:sk-secret-2@a', api_key: [sk-secret-3]}
    - {url: 'http://b?key=sk-secret-4', api_key: {file: sk-secret-5}}
    - {url: 'http://c', api_key: {evn: sk-secret-6}}
    - {url: 'http://d', api_kye: sk-secret-7, tls: {key: {sk-secret-8: x}}}
    - {url: 'http://e x:sk-secret-9@h', api_key: 'sk-secret-10 '}
    - {url: 'u:sk-secret-11@h:80'}
";
        let loaded = Loaded::from_text(text);
        let faults = loaded.config.unwrap_err();
        assert!(9 <= faults.len(), "{faults:#?}");
        let told =
            format!("{faults:?} {}", faults.iter().map(Fault::to_string).collect::<String>());
        assert!(!told.contains("sk-secret"), "a fault goes to logs: {told}");
    }

    #[test]
    fn a_secret_that_cannot_be_read_is_a_fault_of_its_key() {
        let text = "fleet:\n  replicas:\n  - url: http://a:1\n    api_key: {env: WEIR_NO_SUCH}\n";
        let told =
            "4 fleet.replicas[0].api_key: the environment variable `WEIR_NO_SUCH` is not set";
        assert!(fault(text).starts_with(told));
        let text = "fleet: {replicas: [{url: 'http://a:1', api_key: {file: /no/such}}]}";
        assert!(fault(text).contains("the file `/no/such` does not exist"));
    }

    #[test]
    fn the_key_of_another_section_is_shown_its_place() {
        assert!(fault("replicas: []").contains("`fleet.replicas`"));
        assert!(fault("server: {policy: session}").contains("`routing.policy`"));
    }

    #[test]
    fn a_file_is_bounded_and_must_be_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weir.yaml");
        let told = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            Config::load(&path).unwrap_err()[0].to_string()
        };
        assert!(told(&vec![b' '; CONFIG_BYTES_MAX as usize + 1]).contains("is larger than"));
        assert!(told(b"\xff\xfe").contains("is not UTF-8 text"));
        assert!(Config::load(folder.path()).unwrap_err()[0].to_string().contains("is a directory"));
        std::fs::write(&path, "\u{feff}server: {}").unwrap();
        assert!(Config::load(&path).is_ok(), "a byte order mark is no fault");
    }

    #[test]
    fn there_is_an_end_to_faults() {
        let mut text = "fleet:\n  replicas:\n".to_owned();
        (0..1000).for_each(|_| text.push_str("  - {url: x, weight: much}\n"));
        assert_eq!(faults(&text).len(), read::FAULTS_MAX);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn no_text_makes_the_loader_panic(
            key in "(listen|fleet|routing|proxy|server|x)",
            value in "[a-z0-9:\\-\\[\\]{}'\"&*!|>., \n]{0,40}",
        ) {
            let _ = Config::parse(&format!("{key}: {value}"));
            let _ = Config::parse(&format!("fleet: {{replicas: [{{{key}: {value}}}]}}"));
        }
    }
}
