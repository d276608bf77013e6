//! What is wrong with a config, said so that it can be mended: where, what was found, what to do.
//! Nothing is judged here and no secret is quoted. To say something new: make a [`Fault`] where
//! the judgement is made.

use std::fmt;

/// Longest quotation of what was found, in characters.
const FOUND_CHARS_MAX: usize = 60;

/// Words in a key that tell that its value must not be quoted.
const SECRET_WORDS: [&str; 6] =
    ["key", "secret", "token", "password", "authorization", "credential"];

/// One thing that is wrong with a config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which key, as `fleet.replicas[1].url`. Empty: the file as a whole.
    pub path: String,
    /// The line of the file, counted from 1, where it is known.
    pub line: Option<usize>,
    /// What stands there, shortened, never a secret.
    pub found: Option<String>,
    /// What is wrong with it.
    pub problem: String,
    /// What to write instead.
    pub advice: Option<String>,
}

impl Fault {
    /// A fault of the key at `path`.
    pub fn new(path: impl fmt::Display, problem: impl Into<String>) -> Self {
        Self {
            path: path.to_string(),
            line: None,
            found: None,
            problem: problem.into(),
            advice: None,
        }
    }

    /// A fault whose text is `problem; advice`, as the rooms write it.
    pub fn told(path: impl fmt::Display, text: &str) -> Self {
        match text.split_once("; ") {
            Some((problem, advice)) => Self::new(path, problem).advise(advice),
            None => Self::new(path, text),
        }
    }

    /// The same with what to write instead.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// The same with what was found, shortened and without what an URL may hide.
    #[must_use]
    pub fn found(mut self, found: &str) -> Self {
        self.found = Some(quote(found));
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        match self.path.as_str() {
            "" => f.write_str(&self.problem)?,
            path => write!(f, "{path}: {}", self.problem)?,
        }
        if let Some(found) = &self.found {
            write!(f, ", found {found}")?;
        }
        match &self.advice {
            Some(advice) => write!(f, "; {advice}"),
            None => Ok(()),
        }
    }
}

/// One step from a section to what is inside.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Key(String),
    Index(usize),
}

/// The way from the root of the config to a value.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Path(pub(super) Vec<Step>);

impl Path {
    /// Reads `fleet.replicas[1].url`; a key with dots in it stands in quotes.
    pub(super) fn parse(text: &str) -> Self {
        let mut steps = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            if let Some((inside, after)) = rest.strip_prefix('[').and_then(|r| r.split_once(']')) {
                if let Ok(index) = inside.parse() {
                    steps.push(Step::Index(index));
                }
                rest = after;
            } else if let Some((key, after)) =
                rest.strip_prefix('"').and_then(|r| r.split_once('"'))
            {
                steps.push(Step::Key(key.to_owned()));
                rest = after;
            } else if let Some(after) = rest.strip_prefix('.') {
                rest = after;
            } else {
                // At least one character, be it a bracket that is never closed.
                let first = rest.chars().next().map_or(1, char::len_utf8);
                let end = rest[first..].find(['.', '[']).map_or(rest.len(), |end| first + end);
                steps.push(Step::Key(rest[..end].to_owned()));
                rest = &rest[end..];
            }
        }
        Self(steps)
    }

    pub(super) fn key(&self, key: &str) -> Self {
        self.with(Step::Key(key.to_owned()))
    }

    pub(super) fn index(&self, index: usize) -> Self {
        self.with(Step::Index(index))
    }

    /// Whether one of the two lies inside the other, or both are the same.
    pub(super) fn touches(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(mine, theirs)| mine == theirs)
    }

    /// Whether the last key's name tells that its value must not be quoted.
    pub(super) fn hides(&self) -> bool {
        let last = self.0.iter().rev().find_map(|step| match step {
            Step::Key(key) => Some(key.to_ascii_lowercase()),
            Step::Index(_) => None,
        });
        last.is_some_and(|key| SECRET_WORDS.iter().any(|word| key.contains(word)))
    }

    fn with(&self, step: Step) -> Self {
        let mut steps = self.0.clone();
        steps.push(step);
        Self(steps)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, step) in self.0.iter().enumerate() {
            match step {
                Step::Index(index) => write!(f, "[{index}]")?,
                Step::Key(key) => {
                    if 0 < place {
                        f.write_str(".")?;
                    }
                    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
                    match !key.is_empty() && key.chars().all(plain) {
                        true => f.write_str(key)?,
                        false => write!(f, "\"{}\"", shorten(key))?,
                    }
                }
            }
        }
        Ok(())
    }
}

/// The text in quotes, shortened, without the parts of a URL that may be secret.
pub(super) fn quote(text: &str) -> String {
    format!("\"{}\"", shorten(&without_credentials(text)).escape_debug())
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(FOUND_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn without_credentials(text: &str) -> String {
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme, rest)) => (format!("{scheme}://"), rest),
        None => (String::new(), text),
    };
    let rest = match rest.rsplit_once('@') {
        Some((_, host)) => format!("***@{host}"),
        None => rest.to_owned(),
    };
    match rest.split_once('?') {
        Some((before, _)) => format!("{scheme}{before}?***"),
        None => format!("{scheme}{rest}"),
    }
}

/// The known word closest to `word`, if one is close enough to be meant.
pub(super) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let word = word.to_ascii_lowercase().replace('-', "_");
    let reach = 1 + word.len() / 4;
    known
        .iter()
        .map(|candidate| (edits(&word, &candidate.to_ascii_lowercase()), *candidate))
        .filter(|(edits, _)| *edits <= reach)
        .min()
        .map(|(_, candidate)| candidate)
}

/// How many letters must be changed, added, dropped or swapped with their neighbour.
fn edits(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut rows = [vec![0; to.len() + 1], (0..=to.len()).collect(), vec![0; to.len() + 1]];
    for i in 1..=from.len() {
        let [before_last, last, row] = &mut rows;
        row[0] = i;
        for j in 1..=to.len() {
            let changed = last[j - 1] + usize::from(from[i - 1] != to[j - 1]);
            row[j] = changed.min(last[j] + 1).min(row[j - 1] + 1);
            let swapped = 1 < i && 1 < j && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1];
            if swapped {
                row[j] = row[j].min(before_last[j - 2] + 1);
            }
        }
        rows.rotate_left(1);
    }
    rows[1][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_path_reads_back_as_it_was_written() {
        for text in ["fleet.replicas[1].url", "a", "", "fleet.aliases.\"gpt-3.5\"", "x[0][12].y-z"]
        {
            assert_eq!(Path::parse(text).to_string(), text);
        }
    }

    #[test]
    fn the_word_meant_is_found() {
        let known = ["replicas", "aliases", "probe", "breaker", "dns", "between_bytes"];
        for (word, meant) in [
            ("replica", Some("replicas")),
            ("repilcas", Some("replicas")),
            ("Aliases", Some("aliases")),
            ("between-bytes", Some("between_bytes")),
            ("probes", Some("probe")),
            ("workers", None),
        ] {
            assert_eq!(nearest(word, &known), meant, "for {word}");
        }
    }

    #[test]
    fn what_an_url_hides_is_not_quoted() {
        assert_eq!(quote("http://user:k-1@host/x?key=k-2"), "\"http://***@host/x?***\"");
        assert_eq!(quote("user:k-1@k-1@host"), "\"***@host\"");
        assert_eq!(quote("http://host:1/x"), "\"http://host:1/x\"");
    }

    #[test]
    fn a_long_text_is_shortened() {
        assert!(quote(&"é".repeat(1000)).chars().count() < 70);
    }

    proptest! {
        #[test]
        fn a_word_is_nearest_to_itself(word in "[a-z_]{1,12}", other in "[a-z_]{1,12}") {
            prop_assert_eq!(nearest(&word, &[&other, &word]), Some(word.as_str()));
        }

        #[test]
        fn any_text_is_a_path(text in ".{0,40}") {
            let _ = Path::parse(&text).to_string();
        }

        #[test]
        fn edits_are_as_many_both_ways(a in "[ab]{0,8}", b in "[ab]{0,8}") {
            prop_assert_eq!(edits(&a, &b), edits(&b, &a));
        }
    }
}
