//! The engines' `/v1/models` answers: read card by card, merged into one, every field kept as the
//! engine wrote it. Pure: who is asked, and when, is decided elsewhere. To show something more in
//! the list, add a function that makes a card and let the roster call it.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::names::ModelName;

/// Cards taken from one engine; what follows is left out.
pub const CARDS_MAX: usize = 1024;

/// A model as one engine describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Card {
    /// What clients call it.
    pub(super) id: ModelName,
    /// The JSON object, byte for byte as the engine sent it.
    pub(super) json: Arc<str>,
}

/// An answer that is not a list of models.
#[derive(Debug, thiserror::Error)]
#[error("the answer is not a list of models")]
pub(super) struct NoList(#[from] serde_json::Error);

#[derive(Deserialize)]
struct List<'a> {
    #[serde(borrow)]
    data: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct Named<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Spotted<'a> {
    #[serde(borrow)]
    id: &'a RawValue,
}

impl Card {
    /// A card for a model that the config names and no engine has described yet. `created` is in
    /// seconds since 1970.
    pub(super) fn bare(id: &ModelName, created: u64) -> Self {
        let name = quoted(id);
        let json =
            format!(r#"{{"id":{name},"object":"model","created":{created},"owned_by":"vllm"}}"#);
        Self { id: id.clone(), json: json.into() }
    }

    /// The same card under another id; no other byte changes.
    pub(super) fn renamed(&self, id: &ModelName) -> Self {
        let json: &str = &self.json;
        let Ok(spotted) = serde_json::from_str::<Spotted<'_>>(json) else {
            debug_assert!(false, "a card is an object with an id, or it was never made");
            return Self::bare(id, 0);
        };
        let old = spotted.id.get();
        let start = old.as_ptr() as usize - json.as_ptr() as usize;
        let (before, after) = (&json[..start], &json[start + old.len()..]);
        Self { id: id.clone(), json: format!("{before}{}{after}", quoted(id)).into() }
    }
}

/// The cards of a `/v1/models` answer, in its order. A card without an id, or with one that came
/// before, is left out.
pub(super) fn read(body: &[u8]) -> Result<Vec<Card>, NoList> {
    let list: List<'_> = serde_json::from_slice(body)?;
    let mut seen = HashSet::new();
    let mut cards = Vec::with_capacity(list.data.len().min(CARDS_MAX));
    for raw in list.data {
        let Ok(named) = serde_json::from_str::<Named<'_>>(raw.get()) else { continue };
        if named.id.is_empty() || cards.len() == CARDS_MAX {
            continue;
        }
        let id = ModelName::new(&named.id);
        if seen.insert(id.clone()) {
            cards.push(Card { id, json: raw.get().into() });
        }
    }
    Ok(cards)
}

/// Whether two lists say the same. Engines write a fresh date and fresh permission ids into every
/// answer; those do not count.
pub(super) fn alike(one: &[Card], other: &[Card]) -> bool {
    let lasting = |card: &Card| {
        let mut value: serde_json::Value = serde_json::from_str(&card.json).ok()?;
        let fields = value.as_object_mut()?;
        fields.remove("created");
        fields.remove("permission");
        Some(value)
    };
    one.len() == other.len()
        && one.iter().zip(other).all(|(a, b)| {
            a.json == b.json || (a.id == b.id && lasting(a).is_some() && lasting(a) == lasting(b))
        })
}

/// The body of our own `/v1/models` answer.
pub(super) fn list<'a>(cards: impl Iterator<Item = &'a Card>) -> Bytes {
    let mut body = String::from(r#"{"object":"list","data":["#);
    for (index, card) in cards.enumerate() {
        if 0 < index {
            body.push(',');
        }
        body.push_str(&card.json);
    }
    body.push_str("]}");
    Bytes::from(body)
}

fn quoted(id: &ModelName) -> String {
    serde_json::Value::from(id.as_str()).to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ANSWER: &str = r#"{"object":"list","data":[
        {"id":"org/base","object":"model","created":17,"x": 1.0e0,"permission":[{"id":"p"}]},
        {"id":"ad1","parent":"org/base"},
        {"id":"ad1","parent":"again"}, {"object":"model"}, {"id":""}, {"id":7}, 3]}"#;

    fn ids(cards: &[Card]) -> Vec<&str> {
        cards.iter().map(|card| card.id.as_str()).collect()
    }

    #[test]
    fn cards_keep_every_byte_and_nameless_ones_are_left_out() {
        let cards = read(ANSWER.as_bytes()).unwrap();
        assert_eq!(ids(&cards), ["org/base", "ad1"]);
        assert!(cards[0].json.contains(r#""x": 1.0e0"#), "spelling of numbers and blanks stay");
        let body = list(cards.iter());
        assert_eq!(read(&body).unwrap(), cards, "our own list reads the same");
    }

    #[test]
    fn an_alias_is_a_copy_with_another_id_and_no_other_change() {
        let card = &read(ANSWER.as_bytes()).unwrap()[0];
        let alias = card.renamed(&ModelName::new("short \"name\""));
        let expected = card.json.replacen(r#""org/base""#, r#""short \"name\"""#, 1);
        assert_eq!(*alias.json, *expected);
        assert!(alias.json.contains(r#"{"id":"p"}"#), "an inner id is none of our business");
    }

    #[test]
    fn what_is_no_list_is_told_so() {
        for body in ["", "{}", r#"{"error":"Unauthorized"}"#, "[]", r#"{"data":{}}"#, "<html>"] {
            assert!(read(body.as_bytes()).is_err(), "{body}");
        }
        assert!(read(br#"{"data":[]}"#).unwrap().is_empty());
    }

    #[test]
    fn fresh_dates_do_not_make_another_list() {
        let list = |created: u32, length: u32| {
            let body = format!(
                r#"{{"data":[{{"id":"m","created":{created},"max_model_len":{length},
                    "permission":[{{"id":"p-{created}"}}]}}]}}"#
            );
            read(body.as_bytes()).unwrap()
        };
        assert!(alike(&list(1, 8), &list(2, 8)));
        assert!(!alike(&list(1, 8), &list(1, 9)), "an engine restarted with other limits");
        assert!(!alike(&list(1, 8), &[]));
    }

    #[test]
    fn an_endless_list_is_cut() {
        let cards: Vec<Card> =
            (0..CARDS_MAX + 5).map(|n| Card::bare(&ModelName::new(n.to_string()), 0)).collect();
        assert_eq!(read(&list(cards.iter())).unwrap().len(), CARDS_MAX);
    }

    proptest! {
        #[test]
        fn any_name_survives_the_way_into_a_card_and_back(name in ".{1,20}", other in ".{1,20}") {
            let (name, other) = (ModelName::new(name), ModelName::new(other));
            let card = Card::bare(&name, 5);
            let body = list([card.renamed(&other), card.clone()].iter());
            let read = read(&body).unwrap();
            prop_assert_eq!(&read[0].id, &other);
            prop_assert!(read.last().unwrap() == &card);
        }

        #[test]
        fn no_answer_makes_the_reader_fall_over(
            body in proptest::collection::vec(any::<u8>(), 0..80),
        ) {
            let _ = read(&body);
        }
    }
}
