//! How a path is written: slashes, dots, percent signs. Knows no API.

use std::borrow::Cow;

/// The path without double slashes, trailing slash and dot segments; `/` if nothing is left.
/// Borrowed if it was so already. Percent-encoded bytes are left alone.
pub(super) fn normalise(path: &str) -> Cow<'_, str> {
    if path == "*" || is_normal(path) {
        return Cow::Borrowed(path);
    }
    let mut kept = String::with_capacity(path.len() + 1);
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => kept.truncate(kept.rfind('/').unwrap_or(0)),
            _ => {
                kept.push('/');
                kept.push_str(segment);
            }
        }
    }
    if kept.is_empty() {
        kept.push('/');
    }
    Cow::Owned(kept)
}

/// Whether nothing needs a closer look. A segment that merely begins with a dot gets one.
fn is_normal(path: &str) -> bool {
    let bytes = path.as_bytes();
    let doubtful = |pair: &[u8]| matches!(pair, [b'/', b'/' | b'.']);
    bytes.first() == Some(&b'/')
        && (bytes.len() == 1 || bytes.last() != Some(&b'/'))
        && !bytes.windows(2).any(doubtful)
}

/// Undoes percent-encoding once, as the engine's server does: what is no valid escape stays, what
/// is no UTF-8 becomes U+FFFD.
pub(super) fn decode(text: &str) -> Cow<'_, str> {
    let mut parts = text.split('%');
    let head = parts.next().unwrap_or_default();
    if head.len() == text.len() {
        return Cow::Borrowed(text);
    }
    let mut bytes = Vec::with_capacity(text.len());
    bytes.extend_from_slice(head.as_bytes());
    for part in parts {
        match part.as_bytes() {
            [high, low, rest @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                bytes.push(hex(*high) << 4 | hex(*low));
                bytes.extend_from_slice(rest);
            }
            rest => {
                bytes.push(b'%');
                bytes.extend_from_slice(rest);
            }
        }
    }
    Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
}

/// The value of a hexadecimal digit.
fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20).wrapping_sub(b'a').wrapping_add(10) & 0x0f,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percent_signs_are_undone_once() {
        assert_eq!(decode("a%2Fb%2f"), "a/b/");
        assert_eq!(decode("%E2%82%AC%4a%4F"), "€JO");
        assert_eq!(decode("%"), "%");
        assert_eq!(decode("%2"), "%2");
        assert_eq!(decode("%zz%25"), "%zz%");
        assert_eq!(decode("a%ff"), "a\u{fffd}");
        assert!(matches!(decode("plain"), Cow::Borrowed("plain")));
    }

    proptest! {
        #[test]
        fn a_normal_path_stays_as_it_is(path in "[/.a%*]{0,12}") {
            let once = normalise(&path).into_owned();
            prop_assert_eq!(&normalise(&once), &once);
            prop_assert!(once == "*" || once.starts_with('/'));
            prop_assert!(!once.contains("//"));
            prop_assert!(once.split('/').all(|segment| segment != ".." && segment != "."));
        }
    }
}
