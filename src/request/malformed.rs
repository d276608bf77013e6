//! Why a request cannot be read: the one error of this room.
//! The texts are for the client and hold nothing the client wrote but a media type, cut short.
//! To add a reason: a variant, its status if it is not 400, its `param` if a field is to blame.

use thiserror::Error;

/// Characters of client text an error may repeat.
const QUOTED_CHARACTERS_MAX: usize = 80;

/// A request that no engine could answer, so none is asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Malformed {
    /// Nothing but white space came.
    #[error("the request body is empty")]
    Empty,
    /// The body is longer than the limit.
    #[error("the request body is larger than {bytes_max} bytes, the limit of this server")]
    TooLarge {
        /// The limit it passed.
        bytes_max: usize,
    },
    /// The body breaks JSON's grammar.
    #[error("the request body is not valid JSON: expected {expected} at byte {at}")]
    Syntax {
        /// Where, counted from 0.
        at: usize,
        /// What should have stood there.
        expected: &'static str,
    },
    /// The body is JSON but for bytes that are no UTF-8.
    #[error("the request body is not valid UTF-8 at byte {at}")]
    NotUtf8 {
        /// Where, counted from 0.
        at: usize,
    },
    /// Too many objects and arrays inside one another.
    #[error("the request body nests deeper than {depth_max} levels")]
    TooDeep {
        /// The limit it passed.
        depth_max: u32,
    },
    /// Too many fields in the outermost object.
    #[error("the request body has more than {members_max} top-level fields")]
    TooManyMembers {
        /// The limit it passed.
        members_max: usize,
    },
    /// JSON, but not an object.
    #[error("the request body must be a JSON object")]
    NotAnObject,
    /// A field Weir must understand has another type.
    #[error("`{param}` must be {expected}")]
    WrongType {
        /// The field.
        param: &'static str,
        /// What it may be.
        expected: &'static str,
    },
    /// The body is declared to be something this API does not take.
    #[error("this path takes content-type `{expected}`, not `{got}`")]
    MediaType {
        /// What the API takes.
        expected: &'static str,
        /// What the client declared, shortened.
        got: String,
    },
    /// The body is no well-formed multipart form.
    #[error("the request body is not a valid multipart form: {why}")]
    Form {
        /// The broken rule.
        why: &'static str,
    },
}

impl Malformed {
    /// The HTTP status to answer with.
    pub fn status(&self) -> u16 {
        match self {
            Self::MediaType { .. } => 415,
            Self::TooLarge { .. } => 413,
            _ => 400,
        }
    }

    /// The field to blame, for `param` in the error's body.
    pub fn param(&self) -> Option<&'static str> {
        match self {
            Self::WrongType { param, .. } => Some(param),
            _ => None,
        }
    }

    pub(super) fn media_type(expected: &'static str, got: &[u8]) -> Self {
        let got = String::from_utf8_lossy(got)
            .chars()
            .filter(|character| !character.is_control())
            .take(QUOTED_CHARACTERS_MAX)
            .collect();
        Self::MediaType { expected, got }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_repeats_only_the_start_of_what_the_client_wrote() {
        let error = Malformed::media_type("application/json", "ä".repeat(5_000).as_bytes());
        assert_eq!(error.status(), 415);
        assert!(error.to_string().chars().count() < 200);
        let error = Malformed::media_type("application/json", b"text/plain\r\nx: y");
        assert!(!error.to_string().contains('\n'), "an error must not carry a line break");
    }

    #[test]
    fn only_a_wrong_field_has_a_param() {
        let error = Malformed::WrongType { param: "model", expected: "a string" };
        assert_eq!((error.status(), error.param()), (400, Some("model")));
        assert_eq!((Malformed::Empty.status(), Malformed::Empty.param()), (400, None));
        assert_eq!(Malformed::TooLarge { bytes_max: 1 }.status(), 413);
    }
}
