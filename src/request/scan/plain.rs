//! How far a string goes on without a byte that needs a look. The speed of a scan is made here.
//! Nothing here knows JSON beyond the three kinds of byte that end a plain run.
//! To make it faster: measure with `benches/parse.rs` first.

/// The bit of each byte that ASCII leaves unset.
pub(super) const HIGH_BITS: u64 = u64::from_ne_bytes([0x80; 8]);
/// Words looked at one by one before whole blocks are: most strings are short.
const WORDS_FIRST: usize = 4;
const BLOCK: usize = 64;

/// How many bytes at the start hold neither quote, backslash nor control character. All those
/// bytes, and at times some behind them, are or-ed into `bits`.
pub(super) fn plain_run(bytes: &[u8], bits: &mut u64) -> usize {
    let (words, _) = bytes.as_chunks::<8>();
    let mut at = 0;
    for word in words.iter().take(WORDS_FIRST) {
        let word = u64::from_le_bytes(*word);
        *bits |= word;
        match first_special(word) {
            Some(length) => return at + length,
            None => at += 8,
        }
    }
    if at == 8 * WORDS_FIRST {
        at + plain_run_long(rest_of(bytes, at), bits)
    } else {
        at + plain_run_short(rest_of(bytes, at), bits)
    }
}

/// As `plain_run`, for long strings.
fn plain_run_long(bytes: &[u8], bits: &mut u64) -> usize {
    let (blocks, _) = bytes.as_chunks::<BLOCK>();
    let mut at = 0;
    for block in blocks {
        let (special, seen) = look_at(block);
        *bits |= u64::from(seen);
        if special {
            break;
        }
        at += BLOCK;
    }
    let (words, _) = rest_of(bytes, at).as_chunks::<8>();
    for word in words {
        let word = u64::from_le_bytes(*word);
        *bits |= word;
        match first_special(word) {
            Some(length) => return at + length,
            None => at += 8,
        }
    }
    at + plain_run_short(rest_of(bytes, at), bits)
}

/// As `plain_run`, for the few bytes at the end of a body.
fn plain_run_short(bytes: &[u8], bits: &mut u64) -> usize {
    let length = bytes.iter().take_while(|byte| !is_special(**byte)).count();
    *bits |= bytes.iter().fold(0, |bits, byte| bits | u64::from(*byte));
    length
}

fn rest_of(bytes: &[u8], at: usize) -> &[u8] {
    bytes.get(at..).unwrap_or_default()
}

fn is_special(byte: u8) -> bool {
    byte == b'"' || byte == b'\\' || byte < 0x20
}

/// Whether a block holds a special byte, and all its bytes or-ed together. Without branches, so
/// that the compiler makes a few vector instructions of it.
#[inline]
fn look_at(block: &[u8; BLOCK]) -> (bool, u8) {
    let mut special = false;
    let mut seen = 0;
    for byte in block {
        special |= is_special(*byte);
        seen |= byte;
    }
    (special, seen)
}

/// Where the first special byte of eight is. Bytes above it may be judged wrongly, it never is:
/// the borrow of a subtraction only runs upwards from a byte that was special itself.
#[inline]
fn first_special(word: u64) -> Option<usize> {
    const ONES: u64 = u64::from_ne_bytes([0x01; 8]);
    const QUOTES: u64 = u64::from_ne_bytes([b'"'; 8]);
    const BACKSLASHES: u64 = u64::from_ne_bytes([b'\\'; 8]);
    const SPACES: u64 = u64::from_ne_bytes([0x20; 8]);
    let quote = word ^ QUOTES;
    let backslash = word ^ BACKSLASHES;
    let found = (quote.wrapping_sub(ONES) & !quote)
        | (backslash.wrapping_sub(ONES) & !backslash)
        | (word.wrapping_sub(SPACES) & !word);
    let found = found & HIGH_BITS;
    if found == 0 { None } else { Some(found.trailing_zeros() as usize / 8) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_run_of_plain_bytes_ends_where_a_slow_look_ends_it(
            mut bytes in prop::collection::vec(0x20_u8..=0xff, 0..300),
            specials in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            for (at, byte) in specials {
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] = byte;
                }
            }
            let slow = bytes.iter().position(|byte| is_special(*byte)).unwrap_or(bytes.len());
            let mut bits = 0;
            prop_assert_eq!(plain_run(&bytes, &mut bits), slow);
            let ascii = bytes[..slow].is_ascii();
            prop_assert!(ascii || bits & HIGH_BITS != 0, "a high bit was overlooked");
            prop_assert!(!bytes.is_ascii() || bits & HIGH_BITS == 0);
        }
    }
}
