//! The YAML text as a tree that keeps what serde would lose (keys given twice, order), and the
//! line a path stands on. Only here is the YAML crate's reader named, so that it can be swapped.
//! Nothing is judged here.

use std::fmt;

use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, IgnoredAny, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};

use super::fault::{Fault, Path, Step, quote};

/// A value of the config file.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Node {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Self>),
    /// Keys in the order of the file, a key given twice twice.
    Map(Vec<(String, Self)>),
    /// A value with a YAML tag (`!name`).
    Tagged(String),
    /// A value that was found faulty and is read as if it were not there.
    Hole,
}

/// Reads the text of a config file.
pub(super) fn read(text: &str) -> Result<Node, Fault> {
    serde_yaml::Deserializer::from_str(text).deserialize_any(NodeVisitor).map_err(|error| {
        let line = error.location().map(|place| place.line());
        let told = error.to_string();
        // The line is told apart, in the fault's own field.
        let problem = told.split(" at line ").next().unwrap_or_default();
        let mut fault = Fault::new("", format!("not YAML: {problem}"))
            .advise("check the indentation (spaces, no tabs), colons and quotes around this line");
        fault.line = line;
        fault
    })
}

/// The line on which `path` stands, or the closest outer one that is in the text. Where a key is
/// given more than once, `occurrence` 1 is the second.
pub(super) fn line_of(text: &str, path: &Path, occurrence: usize) -> Option<usize> {
    (1..=path.0.len()).rev().find_map(|steps| {
        let occurrence = if steps == path.0.len() { occurrence } else { 0 };
        let seek = Seek { steps: &path.0[..steps], occurrence };
        // The seeker fails on purpose where it arrives: an error knows its place.
        let stopped = seek.deserialize(serde_yaml::Deserializer::from_str(text)).err()?;
        stopped.location().map(|place| place.line())
    })
}

impl Node {
    /// Makes a hole where `path` leads.
    pub(super) fn cut(&mut self, path: &Path) -> bool {
        let mut node = self;
        for step in &path.0 {
            let inner = match (step, node) {
                (Step::Key(key), Self::Map(entries)) => {
                    entries.iter_mut().find(|(name, _)| name == key).map(|(_, value)| value)
                }
                (Step::Index(index), Self::List(items)) => items.get_mut(*index),
                _ => None,
            };
            let Some(inner) = inner else { return false };
            node = inner;
        }
        *node = Self::Hole;
        true
    }

    /// What `path` leads to.
    pub(super) fn at(&self, path: &Path) -> Option<&Self> {
        path.0.iter().try_fold(self, |node, step| match (step, node) {
            (Step::Key(key), Self::Map(entries)) => {
                entries.iter().find(|(name, _)| name == key).map(|(_, value)| value)
            }
            (Step::Index(index), Self::List(items)) => items.get(*index),
            _ => None,
        })
    }

    /// The value in a few words, for a fault. Texts are quoted, so no secret may come here.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Null | Self::Hole => "nothing".to_owned(),
            Self::Bool(value) => value.to_string(),
            Self::Int(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Text(text) => quote(text),
            Self::List(items) => format!("a list of {}", items.len()),
            Self::Map(entries) => format!("a section of {}", entries.len()),
            Self::Tagged(tag) => format!("a value with the tag {}", quote(tag)),
        }
    }
}

struct NodeVisitor;

impl<'de> DeserializeSeed<'de> for NodeVisitor {
    type Value = Node;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_none<E: Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Int(i128::from(value)))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Int(i128::from(value)))
    }

    fn visit_i128<E: Error>(self, value: i128) -> Result<Node, E> {
        Ok(Node::Int(value))
    }

    fn visit_u128<E: Error>(self, value: u128) -> Result<Node, E> {
        Ok(Node::Int(i128::try_from(value).unwrap_or(i128::MAX)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Float(value))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Node, E> {
        Ok(Node::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Self)? {
            list.push(item);
        }
        Ok(Node::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key_seed(Self)? {
            let key = match key {
                Node::Text(text) => text,
                other => other.describe(),
            };
            entries.push((key, map.next_value_seed(Self)?));
        }
        Ok(Node::Map(entries))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<Node, A::Error> {
        let (tag, inner) = tagged.variant::<String>()?;
        inner.newtype_variant::<IgnoredAny>()?;
        Ok(Node::Tagged(tag))
    }
}

/// Walks down the path and stops with an error where it ends.
struct Seek<'a> {
    steps: &'a [Step],
    occurrence: usize,
}

impl<'de> DeserializeSeed<'de> for Seek<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.steps {
            [] => deserializer.deserialize_any(Stop),
            _ => deserializer.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for Seek<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the next step of the path")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let Some((Step::Key(want), rest)) = self.steps.split_first() else {
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        };
        loop {
            let last = rest.is_empty() && self.occurrence == 0;
            match map.next_key_seed(SeekKey { want, stop: last })? {
                None => return Ok(()),
                Some(false) => map.next_value::<IgnoredAny>().map(drop)?,
                Some(true) if rest.is_empty() => {
                    self.occurrence -= 1;
                    map.next_value::<IgnoredAny>().map(drop)?;
                }
                Some(true) => map.next_value_seed(Seek { steps: rest, ..self })?,
            }
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        if let Some((Step::Index(want), rest)) = self.steps.split_first() {
            for _ in 0..*want {
                if items.next_element::<IgnoredAny>()?.is_none() {
                    return Ok(());
                }
            }
            let _ = items.next_element_seed(Seek { steps: rest, ..self })?;
        }
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
}

/// Compares a key and, where the path ends with it, stops.
struct SeekKey<'a> {
    want: &'a str,
    stop: bool,
}

impl<'de> DeserializeSeed<'de> for SeekKey<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for SeekKey<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<bool, E> {
        match key == self.want {
            true if self.stop => Err(E::custom("here")),
            same => Ok(same),
        }
    }
}

/// Refuses every value, so that the error tells where it stands.
struct Stop;

impl<'de> Visitor<'de> for Stop {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("to stop here")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "\
# a comment
listen:
  - address: 0.0.0.0:8080
  - {address: 0.0.0.0:8081, tls: {key: a,
     certificate: b}}
aliases:
  gpt-3.5: x
  1: y
  gpt-3.5: z
tail: |
  aliases:
    none
";

    fn line(path: &str) -> Option<usize> {
        line_of(TEXT, &Path::parse(path), 0)
    }

    #[test]
    fn a_path_knows_its_line() {
        assert_eq!(line("listen"), Some(2));
        assert_eq!(line("listen[0].address"), Some(3));
        assert_eq!(line("listen[1]"), Some(4));
        assert_eq!(line("listen[1].tls.certificate"), Some(5));
        assert_eq!(line("aliases.\"gpt-3.5\""), Some(7));
        assert_eq!(line("aliases.1"), Some(8));
        assert_eq!(line("tail"), Some(10));
        assert_eq!(line_of(TEXT, &Path::parse("aliases.\"gpt-3.5\""), 1), Some(9));
    }

    #[test]
    fn a_path_that_is_not_in_the_text_has_the_line_of_what_is() {
        assert_eq!(line("listen[0].tls.key"), Some(3));
        assert_eq!(line("nothing"), None);
        assert_eq!(line(""), None);
    }

    #[test]
    fn a_key_given_twice_is_kept_twice() {
        let Node::Map(entries) = read("a: 1\nb: x\na: 2").unwrap() else { panic!("not a map") };
        let keys: Vec<_> = entries.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["a", "b", "a"]);
    }

    #[test]
    fn text_that_is_not_yaml_names_the_line() {
        let fault = read("listen:\n  - a\n b: [\n").unwrap_err();
        assert!(fault.line.is_some(), "{fault}");
        assert!(!fault.problem.contains("line"), "{fault}");
        let fault = read("a: 1\n---\nb: 2").unwrap_err();
        assert!(fault.problem.contains("more than one document"), "{fault}");
    }

    #[test]
    fn a_tag_is_kept_to_be_refused() {
        assert_eq!(read("!python/object x").unwrap(), Node::Tagged("python/object".into()));
    }

    #[test]
    fn a_few_lines_cannot_grow_into_gigabytes() {
        let mut text = "a: &a [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for (this, last) in ('b'..='j').zip('a'..) {
            text.push_str(&format!(
                "{this}: &{this} [{}]\n",
                vec![format!("*{last}"); 9].join(", ")
            ));
        }
        assert!(read(&text).unwrap_err().problem.contains("repetition limit"));
    }

    #[test]
    fn a_hole_hides_what_was_there() {
        let mut root = read("a: [{b: 1}, {b: 2}]").unwrap();
        assert!(root.cut(&Path::parse("a[1].b")));
        assert!(!root.cut(&Path::parse("a[7]")));
        assert_eq!(root.at(&Path::parse("a[1].b")), Some(&Node::Hole));
        assert_eq!(root.at(&Path::parse("a[0].b")), Some(&Node::Int(1)));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "[a-z:\\-\\[\\]{}\n\"'&*!|> 0-9]{0,60}") {
            let _ = read(&text);
            let _ = line_of(&text, &Path::parse("a[0].b"), 0);
        }
    }
}
