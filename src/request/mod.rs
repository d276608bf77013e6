//! What the client asked for: which API, which model, which prompt, streamed or not.
//! Pure: bytes in, views over the same bytes out. No socket, no clock, no dice, and no copy of a
//! body except the one made when a field of it is edited.
//! To add a path: a row in `api::APIS`. To read one more field: a method on `Inference`.

mod api;
mod inference;
mod malformed;
mod multipart;
mod options;
mod rewrite;
mod scan;
mod value;

pub use api::{
    APIS, Api, Found, Methods, ModelSource, Route, Treatment, Wire, find, model_in_query,
};
pub use inference::{Inference, MEMBERS_MAX, PromptPart};
pub use malformed::Malformed;
pub use multipart::{BOUNDARY_BYTES_MAX, PARTS_MAX};
pub use options::{EngineAdmin, Limits, Options, UnknownPaths};
pub use rewrite::Edits;
pub use scan::{Kind, Member, Span, scan};
pub use value::Value;
