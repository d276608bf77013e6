//! Multipart forms: where the fields of one are, found without copying it.
//! Judges a form as the engine's own parser does (CRLF line ends, the last of two fields counts),
//! so that both see the same model. To support another kind of form: another file.

use memchr::memmem;
use smallvec::SmallVec;

use super::malformed::Malformed;
use super::scan::Span;

/// Longest boundary taken, in bytes. RFC 2046 allows 70.
pub const BOUNDARY_BYTES_MAX: usize = 256;
/// Most parts one form may have. The engine takes 1,000 files and 1,000 fields.
pub const PARTS_MAX: usize = 2_000;

/// Parts remembered without allocating.
const PARTS_INLINE: usize = 8;

/// What a part carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Text,
    File,
}

/// One part of a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its name as written, without quotes.
    pub(super) name: Span,
    /// Its content.
    pub(super) value: Span,
    pub(super) content: Content,
}

/// The parts of a form, in order.
#[derive(Clone, Debug)]
pub(super) struct Form {
    parts: SmallVec<[Part; PARTS_INLINE]>,
}

impl Form {
    /// Finds the parts of `body`. `content_type` must declare a multipart form.
    pub(super) fn read(content_type: &[u8], body: &[u8]) -> Result<Self, Malformed> {
        let boundary = boundary(content_type)?;
        let line = [b"\r\n--", boundary].concat();
        let mut reader = Reader { body, at: 0, delimiter: memmem::Finder::new(&line) };
        let mut parts = SmallVec::new();
        let mut more = reader.first_delimiter()?;
        while more {
            if parts.len() == PARTS_MAX {
                return Err(Malformed::Form { why: "it has too many parts" });
            }
            let (name, content) = reader.head()?;
            let start = reader.at;
            let end;
            (end, more) = reader.next_delimiter()?;
            parts.push(Part { name, value: Span::new(start, end), content });
        }
        Ok(Self { parts })
    }

    /// The last part of that name: the one that counts.
    pub(super) fn get(&self, body: &[u8], name: &str) -> Option<Part> {
        self.parts.iter().rev().find(|part| part.name.of(body) == name.as_bytes()).copied()
    }
}

/// Whether a media type is a multipart form's.
pub(super) fn is_form(media_type: &[u8]) -> bool {
    media_type.eq_ignore_ascii_case(b"multipart/form-data")
}

/// The boundary a content type declares.
fn boundary(content_type: &[u8]) -> Result<&[u8], Malformed> {
    let declared = Parameters::of(content_type)
        .filter(|(name, _)| name.eq_ignore_ascii_case(b"boundary"))
        .last()
        .map(|(_, value)| value);
    match declared {
        Some([]) => Err(Malformed::Form { why: "its boundary is empty" }),
        Some(boundary) if boundary.len() > BOUNDARY_BYTES_MAX => {
            Err(Malformed::Form { why: "its boundary is too long" })
        }
        Some(boundary) => Ok(boundary),
        None => Err(Malformed::Form { why: "its content-type names no boundary" }),
    }
}

struct Reader<'a> {
    body: &'a [u8],
    at: usize,
    delimiter: memmem::Finder<'a>,
}

impl<'a> Reader<'a> {
    /// Passes the first delimiter and whatever stands before it; `false` if it is the last, too.
    fn first_delimiter(&mut self) -> Result<bool, Malformed> {
        // The first line of a body has no line break before it.
        let line = self.delimiter.needle().get(2..).unwrap_or_default();
        if self.body.starts_with(line)
            && let Some(more) = self.after_delimiter(line.len())
        {
            return Ok(more);
        }
        self.next_delimiter().map(|(_, more)| more)
    }

    /// Passes the next delimiter: where the content before it ends, and whether a part follows.
    fn next_delimiter(&mut self) -> Result<(usize, bool), Malformed> {
        loop {
            let Some(offset) = self.delimiter.find(self.rest()) else {
                return Err(Malformed::Form { why: "its closing boundary is missing" });
            };
            let end = self.at + offset;
            if let Some(more) = self.after_delimiter(end + self.delimiter.needle().len()) {
                return Ok((end, more));
            }
            // A longer word that begins like the boundary is content.
            self.at = end + 2;
        }
    }

    /// Judges what stands right behind a delimiter's text: a line break begins a part, two hyphens
    /// end the form, anything else makes it no delimiter.
    fn after_delimiter(&mut self, at: usize) -> Option<bool> {
        let follows = self.body.get(at..)?.get(..2)?;
        let more = match follows {
            b"\r\n" => true,
            b"--" => false,
            _ => return None,
        };
        self.at = at + 2;
        Some(more)
    }

    /// Passes the header lines of a part and the empty line below them.
    fn head(&mut self) -> Result<(Span, Content), Malformed> {
        let mut disposition = None;
        loop {
            let Some(length) = memmem::find(self.rest(), b"\r\n") else {
                return Err(Malformed::Form { why: "a part's header does not end" });
            };
            let line = self.rest().get(..length).unwrap_or_default();
            let line_start = self.at;
            self.at += length + 2;
            if line.is_empty() {
                break;
            }
            let Some(colon) = memchr::memchr(b':', line) else {
                return Err(Malformed::Form { why: "a part's header line has no colon" });
            };
            let (name, value) = line.split_at(colon);
            if name.eq_ignore_ascii_case(b"content-disposition") {
                disposition = Some((value, line_start + colon));
            }
        }
        let Some((value, start)) = disposition else {
            return Err(Malformed::Form { why: "a part has no content-disposition" });
        };
        read_disposition(value, start)
    }

    fn rest(&self) -> &'a [u8] {
        self.body.get(self.at..).unwrap_or_default()
    }
}

/// The name and kind of a part from the value of its content disposition, which stands at `start`.
fn read_disposition(value: &[u8], start: usize) -> Result<(Span, Content), Malformed> {
    let mut parameters = Parameters::of(value);
    let mut name = None;
    let mut content = Content::Text;
    while let Some((key, text)) = parameters.next() {
        if key.eq_ignore_ascii_case(b"name") {
            let end = start + parameters.value_end;
            name = Some(Span::new(end - text.len(), end));
        } else if key.eq_ignore_ascii_case(b"filename") || starts_like(key, b"filename*") {
            content = Content::File;
        } else if starts_like(key, b"name*") {
            // RFC 7578 forbids it; engines would decode it to a name that is not the one seen here.
            return Err(Malformed::Form { why: "a part's name is written as `name*`" });
        }
    }
    let name = name.ok_or(Malformed::Form { why: "a part has no name" })?;
    Ok((name, content))
}

fn starts_like(text: &[u8], start: &[u8]) -> bool {
    text.get(..start.len()).is_some_and(|head| head.eq_ignore_ascii_case(start))
}

/// The parameters `; name=value` of a header's value. A quoted value is given without its quotes,
/// backslashes left in.
struct Parameters<'a> {
    text: &'a [u8],
    at: usize,
    /// Where the value last given ends.
    value_end: usize,
}

impl<'a> Parameters<'a> {
    fn of(text: &'a [u8]) -> Self {
        let at = memchr::memchr(b';', text).unwrap_or(text.len());
        Self { text, at, value_end: at }
    }

    /// Where the part of a list that begins at `from` ends: at a semicolon outside of quotes.
    fn part_end(&self, from: usize) -> usize {
        let mut quoted = false;
        let mut escaped = false;
        for (offset, byte) in self.text.get(from..).unwrap_or_default().iter().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' if quoted => escaped = true,
                b'"' => quoted = !quoted,
                b';' if !quoted => return from + offset,
                _ => {}
            }
        }
        self.text.len()
    }
}

impl<'a> Iterator for Parameters<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.text.len() {
            let start = self.at + 1;
            let end = self.part_end(start);
            self.at = end;
            let part = self.text.get(start..end).unwrap_or_default();
            let Some(equals) = memchr::memchr(b'=', part) else { continue };
            let (name, value) = part.split_at(equals);
            let value = value.get(1..).unwrap_or_default().trim_ascii();
            let trailing = part.len() - part.trim_ascii_end().len();
            self.value_end = end - trailing;
            let value = match value {
                [b'"', inner @ .., b'"'] => {
                    self.value_end -= 1;
                    inner
                }
                plain => plain,
            };
            return Some((name.trim_ascii(), value));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn form(boundary: &str, parts: &[(&str, &[u8])]) -> Vec<u8> {
        let mut body = Vec::new();
        for (head, content) in parts {
            body.extend_from_slice(format!("--{boundary}\r\n{head}\r\n\r\n").as_bytes());
            body.extend_from_slice(content);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
        body
    }

    fn model(content_type: &str, body: &[u8]) -> Option<String> {
        let form = Form::read(content_type.as_bytes(), body).unwrap();
        let part = form.get(body, "model")?;
        Some(String::from_utf8(part.value.of(body).to_vec()).unwrap())
    }

    fn why(content_type: &str, body: &[u8]) -> Malformed {
        Form::read(content_type.as_bytes(), body).unwrap_err()
    }

    const MODEL: &str = "Content-Disposition: form-data; name=\"model\"";
    const FILE: &str = concat!(
        "Content-Disposition: form-data; name=\"file\"; filename=\"Ton ä;\\\" =.wav\"\r\n",
        "Content-Type: audio/wav"
    );

    #[test]
    fn the_model_is_found_after_the_file() {
        let sound: Vec<u8> = (0..100_000_u32).map(|n| (n * 7) as u8).collect();
        let body = form(
            "b",
            &[
                (FILE, &sound),
                ("content-disposition:form-data;name=timestamp_granularities[]", b"word"),
                ("content-disposition:form-data;name=timestamp_granularities[]", b"segment"),
                (MODEL, "öpen/whisper".as_bytes()),
            ],
        );
        let found = model("multipart/form-data; boundary=b", &body);
        assert_eq!(found.as_deref(), Some("öpen/whisper"));
        let form = Form::read(b"multipart/form-data; boundary=b", &body).unwrap();
        let file = form.get(&body, "file").unwrap();
        assert_eq!((file.value.of(&body), file.content), (&sound[..], Content::File));
        assert_eq!(form.parts.len(), 4);
        let granularity = form.get(&body, "timestamp_granularities[]").unwrap();
        assert_eq!(granularity.value.of(&body), b"segment", "the last of two counts");
    }

    #[test]
    fn a_boundary_may_be_quoted_and_odd() {
        for (content_type, boundary) in [
            ("multipart/form-data; boundary=\"a b;c\"; charset=utf-8", "a b;c"),
            ("multipart/form-data;BOUNDARY='()+_,-./:=?", "'()+_,-./:=?"),
            ("Multipart/Form-Data ; x=y; boundary=----WebKit ", "----WebKit"),
        ] {
            let body = form(boundary, &[(MODEL, b"m")]);
            assert_eq!(model(content_type, &body).as_deref(), Some("m"), "{content_type}");
        }
    }

    #[test]
    fn text_like_a_boundary_inside_a_part_is_content() {
        let content = b"\r\n--bc\r\n--b \r\n--b-\r\n-b--b--\r\n\r\n--";
        let body = form("b", &[(FILE, content), (MODEL, b"\r\n\r\n")]);
        let form = Form::read(b"multipart/form-data; boundary=b", &body).unwrap();
        assert_eq!(form.get(&body, "file").unwrap().value.of(&body), content);
        assert_eq!(form.get(&body, "model").unwrap().value.of(&body), b"\r\n\r\n");
    }

    #[test]
    fn what_stands_before_and_behind_the_parts_is_passed_over() {
        let inner = form("b", &[(MODEL, b"m"), (MODEL, b"")]);
        let body = [b"preamble\r\n--bx\r\n", &inner[..], b"epilogue --b\r\n"].concat();
        assert_eq!(model("multipart/form-data; boundary=b", &body).as_deref(), Some(""));
        assert_eq!(model("multipart/form-data; boundary=b", b"--b--"), None);
        let body = form("b", &[(FILE, b"")]);
        assert_eq!(model("multipart/form-data; boundary=b", &body), None);
    }

    #[test]
    fn a_broken_form_is_malformed() {
        let form_data = "multipart/form-data; boundary=b";
        let whole = form("b", &[(FILE, b"x"), (MODEL, b"m")]);
        for length in 0..whole.len() - 4 {
            why(form_data, &whole[..length]);
        }
        why("multipart/form-data", &whole);
        why("multipart/form-data; boundary=", &whole);
        why("multipart/form-data; boundary=\"\"", &whole);
        why(&format!("multipart/form-data; boundary={}", "b".repeat(300)), &whole);
        why(form_data, b"--b\n\nm\n--b--\n");
        why(form_data, b"--b\r\n\r\nm\r\n--b--\r\n");
        why(form_data, b"--b\r\nno colon\r\n\r\nm\r\n--b--\r\n");
        why(form_data, &form("b", &[("Content-Disposition: form-data", b"m")]));
        let extended = "Content-Disposition: form-data; name*=utf-8''model";
        why(form_data, &form("b", &[(extended, b"m")]));
        let many: Vec<_> = (0..=PARTS_MAX).map(|_| (MODEL, &b"m"[..])).collect();
        why(form_data, &form("b", &many));
    }

    #[test]
    fn a_name_inside_a_file_name_is_no_name() {
        let head = "Content-Disposition: form-data; filename=\"x; name=model\"; name=\"file\"";
        let body = form("b", &[(head, b"x")]);
        assert_eq!(model("multipart/form-data; boundary=b", &body), None);
        let head = "Content-Disposition: form-data; name=\"file\"; name=\"model\" ";
        let body = form("b", &[(head, b"x")]);
        assert_eq!(model("multipart/form-data; boundary=b", &body).as_deref(), Some("x"));
    }

    proptest! {
        #[test]
        fn every_part_is_found_whatever_it_holds(
            contents in prop::collection::vec("[-b\r\n x:;=\"]{0,30}", 0..6),
        ) {
            let unlike: Vec<_> =
                contents.iter().map(|content| content.replace("--b", "..b")).collect();
            let names: Vec<_> = (0..unlike.len())
                .map(|number| format!("Content-Disposition: form-data; name=\"n{number}\""))
                .collect();
            let parts: Vec<_> = names
                .iter()
                .zip(&unlike)
                .map(|(name, content)| (name.as_str(), content.as_bytes()))
                .collect();
            let body = form("b", &parts);
            let form = Form::read(b"multipart/form-data; boundary=b", &body).unwrap();
            prop_assert_eq!(form.parts.len(), unlike.len());
            for (number, content) in unlike.iter().enumerate() {
                let part = form.get(&body, &format!("n{number}")).unwrap();
                prop_assert_eq!(part.value.of(&body), content.as_bytes());
            }
        }

        #[test]
        fn no_bytes_make_the_reader_panic(
            body in "(--b|\r\n|Content-Disposition:|;|name=|\"|x|--){0,20}",
            content_type in "multipart/form-data[;= \"b\\\\]{0,8}boundary=[\"b;]{0,4}",
        ) {
            let _ = Form::read(content_type.as_bytes(), body.as_bytes());
            let _ = Form::read(b"multipart/form-data;boundary=b", body.as_bytes());
        }
    }
}
