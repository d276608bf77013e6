//! The manual of the config and the full example, made from the options themselves: keys and
//! defaults from their values, meaning from their doc comments. The tests fail when the files in
//! the tree differ from what is made here; run them with `WEIR_WRITE_DOCS=1` to write the files.
//! Only for tests. To change a text: change the doc comment of the key.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path as FilePath, PathBuf};

use serde_yaml::Value;

use super::Config;

const MANUAL: &str = "docs/configuration.md";
const FULL: &str = "conf/examples/full.yaml";

/// A config in which every list of sections has one entry.
const EXAMPLE: &str = "fleet: {replicas: [{url: 'http://10.0.0.5:8000'}]}";

/// Width of a comment in the full example.
const COMMENT_WIDTH: usize = 96;

const INTRO: &str = "\
# Configuration

Weir reads one YAML file: `weir --config FILE`. The smallest useful one is
[conf/weir.yaml](../conf/weir.yaml); [conf/examples](../conf/examples) has one for each feature, and
[full.yaml](../conf/examples/full.yaml) has every key with its default.

```yaml
fleet:
  replicas:
    - url: http://10.0.0.5:8000
    - url: http://10.0.0.6:8000
```

**Checking.** `weir check FILE` says everything that is wrong at once, with line, key, and what to
write instead. Unknown keys, keys given twice, numbers without their unit and files that are not
there are faults: a file is taken whole or not at all. `weir check --print FILE` shows the effective
config, defaults filled in and secrets hidden.

**Reloading.** While Weir runs, a changed file is taken over within a second, or within
`server.config_poll` where the file system tells no changes. So are changed secrets and
certificates that the file names. SIGHUP and the admin API have it read at once. A file with a
fault changes nothing, and the log says what is wrong. What is in the sections `listen`, `admin`,
`telemetry` and `server` takes effect at the next start; the log names such changes.

**Values.** A duration is a number with its unit: `500ms`, `30s`, `5m`, `1h`. A size likewise:
`64KiB`, `16MiB`, `1GiB`. A relative path is taken as seen from the working directory. A key that
is left out has its default; `null` stands for *none*.

**Secrets.** Where the type is *secret*, write `{env: NAME}` to take it from the environment,
`{file: PATH}` to read it from a file (without the newline at its end; read again on reload), or
the text itself, which earns a warning. A secret is never shown: not in logs, not in faults, not by
the admin API.

In the tables, `[]` stands for each entry of a list, and a name in `<>` for one you choose.

<!-- Made from the options in src/. Change their doc comments and run the tests with
     WEIR_WRITE_DOCS=1, rather than change the tables. -->
";

const FULL_INTRO: &str = "\
# Every key with its default. Take from it what you need: a key that is left out has the value
# shown here. Only the replica is made up, and of what is `null` there is none.
#
# Made from the options in src/: change their doc comments and run the tests with WEIR_WRITE_DOCS=1.
";

/// What the source says of a field.
#[derive(Clone, Debug)]
struct Field {
    name: String,
    doc: String,
    kind: String,
}

/// What the source says of a type: the fields of a struct, or the words of an enum.
#[derive(Clone, Debug)]
enum Type {
    Struct(Vec<Field>),
    Enum(Vec<String>),
}

/// All option types, by room and name.
struct Source {
    types: BTreeMap<(String, String), Type>,
}

/// A key of the config.
struct Key {
    path: String,
    kind: String,
    doc: String,
    /// `None`: the section or entry it is in is not there by default.
    value: Option<Value>,
    below: Vec<Self>,
}

/// The root of the repository.
fn root() -> PathBuf {
    FilePath::new(file!()).ancestors().nth(3).unwrap().to_owned()
}

impl Source {
    fn read() -> Self {
        let mut types = BTreeMap::new();
        for room in
            ["config", "fleet", "routing", "request", "proxy", "response", "telemetry", "admission"]
        {
            let mut folders = vec![root().join("src").join(room)];
            while let Some(folder) = folders.pop() {
                for entry in std::fs::read_dir(folder).into_iter().flatten() {
                    let path = entry.unwrap().path();
                    if path.is_dir() {
                        folders.push(path);
                    } else if path.extension().is_some_and(|ext| ext == "rs") {
                        read_types(room, &std::fs::read_to_string(path).unwrap(), &mut types);
                    }
                }
            }
        }
        Self { types }
    }

    fn get(&self, room: &str, kind: &str) -> Option<(String, &Type)> {
        let (room, name) = kind.split_once("::").unwrap_or((room, kind));
        let found = self.types.get(&(room.to_owned(), name.to_owned()))?;
        Some((room.to_owned(), found))
    }

    fn keys(&self, room: &str, fields: &[Field], at: &str, value: Option<&Value>) -> Vec<Key> {
        fields
            .iter()
            .map(|field| {
                let path =
                    if at.is_empty() { field.name.clone() } else { format!("{at}.{}", field.name) };
                let value = value.map(|value| {
                    value.get(field.name.as_str()).cloned().unwrap_or_else(|| {
                        panic!("{path} is in the source and not in the config: a renamed field?")
                    })
                });
                let (inner, list) =
                    match (unwrap(&field.kind, "Vec"), unwrap(&field.kind, "Option")) {
                        (Some(inner), _) => (inner, true),
                        (_, Some(inner)) => (inner, false),
                        _ => (field.kind.as_str(), false),
                    };
                let below = if inner == "Secret" { None } else { self.get(room, inner) };
                let (below, kind) = match below {
                    Some((room, Type::Struct(fields))) => {
                        let at = if list { format!("{path}[]") } else { path.clone() };
                        let value = match (&value, list) {
                            (Some(Value::Sequence(items)), true) => items.first(),
                            (Some(Value::Null), _) => None,
                            (value, _) => value.as_ref(),
                        };
                        let kind = if list { "list of sections" } else { "section" };
                        (self.keys(&room, fields, &at, value), kind.to_owned())
                    }
                    found => (Vec::new(), kind_words(&field.kind, found.map(|(_, words)| words))),
                };
                Key { path, kind, doc: field.doc.clone(), value, below }
            })
            .collect()
    }
}

/// Finds `pub struct` and `pub enum` with their doc comments. Knows what rustfmt makes of them.
fn read_types(room: &str, text: &str, types: &mut BTreeMap<(String, String), Type>) {
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let head = line.strip_suffix(" {");
        if let Some(name) = head.and_then(|head| head.strip_prefix("pub struct ")) {
            types.insert((room.to_owned(), name.to_owned()), Type::Struct(fields(&mut lines)));
        } else if let Some(name) = head.and_then(|head| head.strip_prefix("pub enum ")) {
            types.insert((room.to_owned(), name.to_owned()), Type::Enum(words(&mut lines)));
        }
    }
}

fn fields<'a>(lines: &mut impl Iterator<Item = &'a str>) -> Vec<Field> {
    let (mut fields, mut doc) = (Vec::new(), String::new());
    for line in lines.take_while(|line| *line != "}") {
        let line = line.trim();
        if let Some(text) = line.strip_prefix("///") {
            write!(doc, "{text}").unwrap();
        } else if let Some((name, kind)) =
            line.strip_prefix("pub ").and_then(|line| line.split_once(": "))
        {
            let kind = kind.trim_end_matches(',').to_owned();
            let doc = std::mem::take(&mut doc).trim().to_owned();
            fields.push(Field { name: name.to_owned(), doc, kind });
        }
    }
    fields
}

fn words<'a>(lines: &mut impl Iterator<Item = &'a str>) -> Vec<String> {
    let variants = lines.take_while(|line| *line != "}").filter_map(|line| {
        line.trim().strip_suffix(',').filter(|name| name.chars().all(char::is_alphanumeric))
    });
    variants.map(snake_case).collect()
}

fn snake_case(name: &str) -> String {
    let mut word = String::new();
    for (place, letter) in name.chars().enumerate() {
        if letter.is_uppercase() && 0 < place {
            word.push('_');
        }
        word.push(letter.to_ascii_lowercase());
    }
    word
}

fn unwrap<'a>(kind: &'a str, outer: &str) -> Option<&'a str> {
    kind.strip_prefix(outer)?.strip_prefix('<')?.strip_suffix('>')
}

fn kind_words(kind: &str, known: Option<&Type>) -> String {
    if let Some(inner) = unwrap(kind, "Option") {
        return kind_words(inner, known);
    }
    if let Some(inner) = unwrap(kind, "Vec") {
        return format!("list of {}", kind_words(inner, known));
    }
    if let Some(Type::Enum(words)) = known {
        return words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
    }
    if unwrap(kind, "BTreeMap").is_some() {
        return "texts by name".to_owned();
    }
    let words = match kind {
        "Duration" => "duration",
        "ByteSize" => "size",
        "bool" => "`true`, `false`",
        "u8" | "u16" | "u32" | "u64" | "usize" | "i64" => "whole number",
        "f32" | "f64" => "number",
        "String" | "ModelName" => "text",
        "PathBuf" => "path",
        "SocketAddr" => "address",
        "Secret" => "secret",
        other => panic!("the manual has no word for the type {other}"),
    };
    words.to_owned()
}

impl Key {
    /// What the doc comment says, and what it says of the default.
    fn doc(&self) -> (String, Option<String>) {
        let doc = self.doc.replace("[`", "`").replace("`]", "`");
        for start in ["Default: ", "Default ", "Required"] {
            if let Some(place) = doc.rfind(start) {
                let told = &doc[place..];
                let told = match start {
                    "Required" => "required",
                    _ => &told[start.len()..],
                };
                let told = told.trim_end_matches('.').to_owned();
                return (doc[..place].trim().to_owned(), Some(told));
            }
        }
        (doc, None)
    }

    fn default_words(&self) -> String {
        match (&self.doc().1, &self.value) {
            (Some(told), Some(Value::Bool(_) | Value::Number(_) | Value::String(_)))
                if !told.contains(['`', ' ']) && told != "required" =>
            {
                format!("`{told}`")
            }
            (Some(told), _) => told.clone(),
            (None, Some(value)) if self.below.is_empty() => format!("`{}`", literal(value)),
            _ => String::new(),
        }
    }

    fn each(&self, see: &mut impl FnMut(&Self)) {
        see(self);
        self.below.iter().for_each(|key| key.each(see));
    }

    fn table(&self, text: &mut String) {
        let path = match self.kind.as_str() {
            "texts by name" => format!("{}.<name>", self.path),
            _ => self.path.clone(),
        };
        let doc = self.doc().0.replace('|', "\\|");
        writeln!(text, "| `{path}` | {} | {} | {doc} |", self.kind, self.default_words()).unwrap();
        self.below.iter().for_each(|key| key.table(text));
    }

    /// Writes the key with its default and its doc comment; `lead` stands in front of the key.
    fn yaml(&self, indent: usize, lead: &str, text: &mut String) {
        let pad = " ".repeat(indent);
        for line in wrap(&self.doc.replace("[`", "`").replace("`]", "`"), COMMENT_WIDTH - indent) {
            writeln!(text, "{pad}# {line}").unwrap();
        }
        let name = self.path.rsplit('.').next().unwrap();
        let head = format!("{}{lead}{name}:", " ".repeat(indent - lead.len()));
        let inside = |text: &mut String, indent: usize, lead: &str| {
            for (place, key) in self.below.iter().enumerate() {
                key.yaml(indent, if place == 0 { lead } else { "" }, text);
            }
        };
        match &self.value {
            Some(Value::Sequence(_)) if !self.below.is_empty() => {
                writeln!(text, "{head}").unwrap();
                inside(text, indent + 4, "- ");
            }
            Some(Value::Mapping(_)) if !self.below.is_empty() => {
                writeln!(text, "{head}").unwrap();
                inside(text, indent + 2, "");
            }
            Some(value) => {
                writeln!(text, "{head} {}", literal(value)).unwrap();
                for key in &self.below {
                    let name = key.path.rsplit('.').next().unwrap();
                    writeln!(text, "{pad}#   {name}: ({})", key.kind).unwrap();
                }
            }
            None => panic!("{}: a key without a value", self.path),
        }
    }
}

/// A value on one line.
fn literal(value: &Value) -> String {
    match value {
        Value::Sequence(items) => {
            format!("[{}]", items.iter().map(literal).collect::<Vec<_>>().join(", "))
        }
        Value::Mapping(entries) if entries.is_empty() => "{}".to_owned(),
        value => serde_yaml::to_string(value).unwrap().trim().to_owned(),
    }
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().unwrap();
        if !line.is_empty() && width < line.chars().count() + 1 + word.chars().count() {
            lines.push(word.to_owned());
        } else {
            line.push_str(if line.is_empty() { "" } else { " " });
            line.push_str(word);
        }
    }
    lines
}

fn sections() -> Vec<Key> {
    let source = Source::read();
    let shown = Config::parse(EXAMPLE).unwrap().shown();
    let Some((room, Type::Struct(fields))) = source.get("config", "Config") else {
        panic!("struct Config is not found in the source");
    };
    source.keys(&room, fields, "", Some(shown.value()))
}

fn manual() -> String {
    let mut text = INTRO.to_owned();
    for section in sections() {
        let (doc, _) = section.doc();
        write!(text, "\n## `{}`\n\n{doc}\n\n", section.path).unwrap();
        text.push_str("| key | type | default | meaning |\n|---|---|---|---|\n");
        section.below.iter().for_each(|key| key.table(&mut text));
    }
    text
}

fn full() -> String {
    let mut text = FULL_INTRO.to_owned();
    for section in sections() {
        text.push('\n');
        section.yaml(0, "", &mut text);
    }
    text
}

/// Compares a file of the tree with what it should be, or writes it.
#[track_caller]
fn assert_file(name: &str, expected: &str) {
    let path = root().join(name);
    if std::env::var_os("WEIR_WRITE_DOCS").is_some() {
        std::fs::write(&path, expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = found.lines().zip(expected.lines()).position(|(found, made)| found != made);
    assert!(
        found == expected,
        "{name} is not what the options say at line {}; run the tests with WEIR_WRITE_DOCS=1",
        differs.map_or(found.lines().count().min(expected.lines().count()), |line| line) + 1
    );
}

#[test]
fn the_manual_is_what_the_options_say() {
    assert_file(MANUAL, &manual());
}

#[test]
fn the_full_example_is_what_the_options_say() {
    assert_file(FULL, &full());
}

#[test]
fn the_full_example_has_every_key_and_is_the_default() {
    let shown = Config::parse(&full()).unwrap().shown();
    assert_eq!(shown, Config::parse(EXAMPLE).unwrap().shown());
    for section in sections() {
        section.each(&mut |key| {
            let name = format!("{}:", key.path.rsplit('.').next().unwrap());
            assert!(full().contains(&name), "{} is not in {FULL}", key.path);
        });
    }
}

#[test]
fn every_key_has_a_meaning() {
    for section in sections() {
        section.each(&mut |key| {
            assert!(10 < key.doc().0.len(), "{} needs a doc comment", key.path);
        });
    }
}

#[test]
fn a_default_that_a_doc_comment_names_is_the_default() {
    for section in sections() {
        section.each(&mut |key| {
            let (_, Some(told)) = key.doc() else { return };
            let scalar = match &key.value {
                Some(value @ (Value::Bool(_) | Value::Number(_))) => literal(value),
                Some(Value::String(text)) => text.clone(),
                _ => return,
            };
            let number = scalar.trim_end_matches(".0");
            let named = told == "required"
                || told.split(|c: char| !(c.is_alphanumeric() || "._-/:".contains(c))).any(
                    |word| {
                        let word = word.trim_end_matches(['.', ':']);
                        let time = humantime::parse_duration(word);
                        let same_time = time.is_ok() && time == humantime::parse_duration(&scalar);
                        word == scalar || word == number || same_time
                    },
                );
            assert!(
                named,
                "{}: its comment says the default is `{told}`, it is `{scalar}`",
                key.path
            );
        });
    }
}
