//! From the tree to the options of all rooms, without stopping at the first fault: what is faulty
//! is noted, cut out of the tree, and the rest is read again.
//! What a value means is the business of its room. To word a fault of a new kind of value better:
//! add its row to `explain` in wording.rs.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, MapAccess,
    SeqAccess, VariantAccess, Visitor,
};

use super::fault::{Fault, Path, Step, nearest};
use super::tree::Node;
use super::wording;
use crate::fleet::Secret;

/// More faults than this help nobody; the rest shows when these are mended.
pub(super) const FAULTS_MAX: usize = 100;

/// What was found wrong so far.
#[derive(Debug, Default)]
pub(super) struct Findings {
    faults: BTreeMap<Path, Vec<Fault>>,
    /// What was cut out of the tree.
    holes: BTreeSet<Path>,
    /// Keys that are unknown where they stand and like none that is known there.
    unknown: BTreeSet<Path>,
    /// Keys that were meant by others, misspelt.
    meant: BTreeSet<Path>,
    /// Which occurrence of a key a fault is about, where it is not the first.
    pub(super) occurrences: BTreeMap<Path, usize>,
}

impl Findings {
    /// Notes a fault, once per place and problem.
    pub(super) fn note(&mut self, path: &Path, mut fault: Fault) {
        fault.path = path.to_string();
        let here = self.faults.entry(path.clone()).or_default();
        if !here.iter().any(|known| known.problem == fault.problem) {
            here.push(fault);
        }
    }

    /// Notes a fault found in what could be read, unless it only follows from a hole or from a
    /// misspelt key.
    pub(super) fn note_checked(&mut self, path: &Path, fault: Fault) {
        let path = self.original(path);
        let follows = self.holes.iter().any(|hole| hole.touches(&path));
        if !follows && !self.meant.contains(&path) && !self.faults.contains_key(&path) {
            self.note(&path, fault);
        }
    }

    /// Replaces the advice for unknown keys that are known elsewhere.
    pub(super) fn advise_unknown(&mut self, place: impl Fn(&str) -> Option<String>) {
        for path in &self.unknown {
            let Some(Step::Key(key)) = path.0.last() else { continue };
            let Some(place) = place(key) else { continue };
            for fault in self.faults.get_mut(path).into_iter().flatten() {
                if fault.problem == wording::UNKNOWN {
                    fault.advice = Some(format!("it belongs elsewhere: `{place}`"));
                }
            }
        }
    }

    pub(super) fn is_clean(&self) -> bool {
        self.faults.is_empty()
    }

    pub(super) fn into_faults(self) -> Vec<(Path, Fault)> {
        let each = |(path, faults): (Path, Vec<Fault>)| {
            faults.into_iter().map(move |fault| (path.clone(), fault)).collect::<Vec<_>>()
        };
        self.faults.into_iter().flat_map(each).take(FAULTS_MAX).collect()
    }

    /// The place in the file of what is now at `path`: items behind a hole have moved up.
    pub(super) fn original(&self, path: &Path) -> Path {
        let mut steps = Path::default();
        for step in &path.0 {
            steps = match step {
                Step::Key(key) => steps.key(key),
                Step::Index(index) => {
                    let mut index = *index;
                    for hole in &self.holes {
                        if let Some((Step::Index(gone), list)) = hole.0.split_last()
                            && list == steps.0
                            && *gone <= index
                        {
                            index += 1;
                        }
                    }
                    steps.index(index)
                }
            };
        }
        steps
    }
}

/// Reads a `T`, as far as it can be read. `None` when nothing can.
pub(super) fn read<T: DeserializeOwned>(root: &mut Node, findings: &mut Findings) -> Option<T> {
    for _ in 0..FAULTS_MAX {
        let noted = RefCell::new(std::mem::take(findings));
        let reader =
            Reader { node: root, path: Path::default(), findings: &noted, hidden: Hidden::No };
        let outcome = T::deserialize(reader);
        *findings = noted.into_inner();
        let stop = match outcome {
            Ok(value) => return Some(value),
            Err(stop) => stop,
        };
        let path = stop.path.unwrap_or_default();
        // A key that is missing because it was cut out has had its fault.
        let known = stop.missing.is_some_and(|key| findings.holes.contains(&path.key(key)));
        if !known {
            findings.note(&path, *stop.fault);
        }
        if path.0.is_empty() || !root.cut(&path) {
            return None;
        }
        findings.holes.insert(path);
    }
    None
}

/// Why reading stopped.
#[derive(Debug)]
pub(super) struct Stop {
    path: Option<Path>,
    fault: Box<Fault>,
    /// What was wanted, where a value of another kind was found.
    wanted: Option<String>,
    missing: Option<&'static str>,
}

impl Stop {
    fn new(problem: impl Into<String>) -> Self {
        Self { path: None, fault: Box::new(Fault::new("", problem)), wanted: None, missing: None }
    }

    fn wanted(wanted: &dyn de::Expected) -> Self {
        Self { wanted: Some(wanted.to_string()), ..Self::new("") }
    }

    /// Says where it happened, unless that is known from further inside.
    fn at(mut self, path: &Path, node: &Node, hidden: Hidden) -> Self {
        if self.path.is_some() {
            return self;
        }
        let hidden = hidden == Hidden::Yes || (path.hides() && matches!(node, Node::Text(_)));
        if let Some(wanted) = self.wanted.take() {
            let (problem, advice) = wording::explain(&wanted, node);
            self.fault.problem = problem;
            self.fault.advice = if hidden { wording::advice_unquoted(&wanted) } else { advice };
        }
        if self.missing.is_none() && !hidden {
            self.fault.found = Some(node.describe());
        }
        self.path = Some(path.clone());
        self
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)
    }
}

impl std::error::Error for Stop {}

impl de::Error for Stop {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self { fault: Box::new(Fault::told("", &text.to_string())), ..Self::new("") }
    }

    fn invalid_type(_: de::Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        Self::wanted(wanted)
    }

    fn invalid_value(_: de::Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        Self::wanted(wanted)
    }

    fn unknown_variant(_: &str, known: &'static [&'static str]) -> Self {
        let mut stop = Self::new("not one of the known words");
        stop.fault.advice = Some(format!("known: {}", known.join(", ")));
        stop
    }

    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        let mut stop = Self::new(format!("holds an unknown key `{key}`"));
        stop.fault.advice = Some(wording::meant(key, known));
        stop
    }

    fn missing_field(key: &'static str) -> Self {
        Self { missing: Some(key), ..Self::new(format!("`{key}` is missing")) }
    }
}

/// Whether what is read must not be quoted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hidden {
    Yes,
    No,
}

/// A value of the tree on its way into an option.
struct Reader<'n> {
    node: &'n Node,
    path: Path,
    findings: &'n RefCell<Findings>,
    hidden: Hidden,
}

impl<'n> Reader<'n> {
    fn inner(&self, node: &'n Node, path: Path) -> Self {
        Self { node, path, findings: self.findings, hidden: self.hidden }
    }

    fn stop(&self, stop: Stop) -> Stop {
        stop.at(&self.path, self.node, self.hidden)
    }

    fn map<'de, V: Visitor<'de>>(
        self,
        known: Option<&'static [&'static str]>,
        visitor: V,
    ) -> Result<V::Value, Stop> {
        let entries = match self.node {
            Node::Map(entries) => entries.as_slice(),
            Node::Null => &[],
            _ => return Err(self.stop(Stop::wanted(&visitor))),
        };
        let mut taken: BTreeMap<&str, usize> = BTreeMap::new();
        let mut good = Vec::with_capacity(entries.len());
        for (key, value) in entries {
            let path = self.path.key(key);
            let seen = taken.entry(key).and_modify(|count| *count += 1).or_default();
            if 0 < *seen {
                let mut findings = self.findings.borrow_mut();
                findings.occurrences.insert(path.clone(), *seen);
                findings.note(&path, wording::given_twice());
            } else if known.is_some_and(|known| !known.contains(&key.as_str())) {
                let known = known.unwrap_or_default();
                let fault = Fault::new("", wording::UNKNOWN).advise(wording::meant(key, known));
                let mut findings = self.findings.borrow_mut();
                findings.note(&path, fault);
                match nearest(key, known) {
                    Some(near) => findings.meant.insert(self.path.key(near)),
                    None => findings.unknown.insert(path),
                };
            } else if *value != Node::Hole {
                good.push((key.as_str(), value));
            }
        }
        let entries = Entries { reader: &self, entries: good.into_iter(), value: None };
        visitor.visit_map(entries).map_err(|stop| self.stop(stop))
    }

    fn seq<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Stop> {
        let items = match self.node {
            Node::List(items) => items.as_slice(),
            Node::Null => &[],
            _ => return Err(self.stop(Stop::wanted(&visitor))),
        };
        let items = Items { reader: &self, items: items.iter().enumerate() };
        visitor.visit_seq(items).map_err(|stop| self.stop(stop))
    }

    fn number<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Stop> {
        match self.node {
            Node::Int(_) | Node::Float(_) => self.any(visitor),
            _ => Err(self.stop(Stop::wanted(&visitor))),
        }
    }

    fn text<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Stop> {
        let outcome = match self.node {
            Node::Text(text) => visitor.visit_str(text),
            // Nothing needs no unit.
            Node::Int(0) if wording::is_duration(&visitor) => visitor.visit_str("0s"),
            _ => Err(Stop::wanted(&visitor)),
        };
        outcome.map_err(|stop| self.stop(stop))
    }

    fn any<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Stop> {
        let unit_missing = wording::is_size(&visitor) && *self.node != Node::Int(0);
        let outcome = match self.node {
            Node::Int(_) if unit_missing => Err(Stop::wanted(&visitor)),
            Node::Null | Node::Hole => visitor.visit_unit(),
            Node::Bool(value) => visitor.visit_bool(*value),
            Node::Float(value) => visitor.visit_f64(*value),
            Node::Text(text) => visitor.visit_str(text),
            Node::Int(value) => match (u64::try_from(*value), i64::try_from(*value)) {
                (Ok(value), _) => visitor.visit_u64(value),
                (_, Ok(value)) => visitor.visit_i64(value),
                _ => visitor.visit_i128(*value),
            },
            Node::List(_) => return self.seq(visitor),
            Node::Map(_) => return self.map(None, visitor),
            Node::Tagged(_) => Err(Stop::new("YAML tags are not understood")),
        };
        outcome.map_err(|stop| self.stop(stop))
    }
}

macro_rules! forward {
    ($to:ident: $($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Stop> {
            self.$to(visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for Reader<'_> {
    type Error = Stop;

    forward! { number:
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
        deserialize_f32 deserialize_f64
    }
    forward! { text: deserialize_char deserialize_str deserialize_string deserialize_identifier }
    forward! { any:
        deserialize_any deserialize_bytes deserialize_byte_buf deserialize_unit
        deserialize_ignored_any
    }
    forward! { seq: deserialize_seq }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Stop> {
        match self.node {
            Node::Bool(value) => visitor.visit_bool(*value).map_err(|stop| self.stop(stop)),
            _ => Err(self.stop(Stop::wanted(&visitor))),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Stop> {
        match self.node {
            Node::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Stop> {
        self.map(None, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Stop> {
        self.map(Some(known), visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        mut self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Stop> {
        if name == Secret::SERDE_NAME {
            self.hidden = Hidden::Yes;
        }
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Stop> {
        self.any(visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Stop> {
        self.seq(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: usize,
        visitor: V,
    ) -> Result<V::Value, Stop> {
        self.seq(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Stop> {
        let (word, content) = match self.node {
            Node::Text(word) => (word.clone(), None),
            Node::Map(entries) if entries.len() == 1 => (
                entries[0].0.clone(),
                Some(self.inner(&entries[0].1, self.path.key(&entries[0].0))),
            ),
            other => (other.describe(), None),
        };
        if !known.contains(&word.as_str()) {
            let mut stop: Stop = de::Error::unknown_variant(&word, known);
            if let (Some(meant), Some(advice)) = (nearest(&word, known), &mut stop.fault.advice) {
                *advice = format!("did you mean `{meant}`? {advice}");
            }
            return Err(self.stop(stop));
        }
        visitor.visit_enum(Variant { word, content }).map_err(|stop| self.stop(stop))
    }
}

struct Entries<'r, 'n, I> {
    reader: &'r Reader<'n>,
    entries: I,
    value: Option<(&'n str, &'n Node)>,
}

impl<'de, 'n, I: Iterator<Item = (&'n str, &'n Node)>> MapAccess<'de> for Entries<'_, 'n, I> {
    type Error = Stop;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Stop> {
        self.value = self.entries.next();
        match self.value {
            Some((key, _)) => seed.deserialize(key.into_deserializer()).map(Some),
            None => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Stop> {
        let Some((key, node)) = self.value.take() else {
            return Err(Stop::new("a value was asked for before its key"));
        };
        let path = self.reader.path.key(key);
        let inner = self.reader.inner(node, path.clone());
        // Some types (`#[serde(with)]`, `TryFrom`) make their errors after the reader is gone.
        seed.deserialize(inner).map_err(|stop| stop.at(&path, node, self.reader.hidden))
    }
}

struct Items<'r, 'n, I> {
    reader: &'r Reader<'n>,
    items: I,
}

impl<'de, 'n, I: Iterator<Item = (usize, &'n Node)>> SeqAccess<'de> for Items<'_, 'n, I> {
    type Error = Stop;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Stop> {
        let Some((index, node)) = self.items.find(|(_, node)| **node != Node::Hole) else {
            return Ok(None);
        };
        let path = self.reader.path.index(index);
        let inner = self.reader.inner(node, path.clone());
        let outcome = seed.deserialize(inner);
        outcome.map(Some).map_err(|stop| stop.at(&path, node, self.reader.hidden))
    }
}

struct Variant<'n> {
    word: String,
    content: Option<Reader<'n>>,
}

impl<'de, 'n> EnumAccess<'de> for Variant<'n> {
    type Error = Stop;
    type Variant = Content<'n>;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Self::Variant), Stop> {
        let word = seed.deserialize(self.word.into_deserializer())?;
        Ok((word, Content(self.content)))
    }
}

/// What stands below a word of an enum, if anything.
struct Content<'n>(Option<Reader<'n>>);

impl<'de> VariantAccess<'de> for Content<'_> {
    type Error = Stop;

    fn unit_variant(self) -> Result<(), Stop> {
        match self.0 {
            None => Ok(()),
            Some(_) => Err(Stop::new("this word stands alone, without keys below it")),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Stop> {
        match self.0 {
            Some(reader) => seed.deserialize(reader),
            None => Err(Stop::new("this word needs a value of its own")),
        }
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Stop> {
        match self.0 {
            Some(reader) => reader.seq(visitor),
            None => Err(Stop::new("this word needs a list of its own")),
        }
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Stop> {
        match self.0 {
            Some(reader) => reader.map(Some(known), visitor),
            None => Err(Stop::new("this word needs keys of its own")),
        }
    }
}
