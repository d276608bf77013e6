//! Text of the simulated model: cutting it into tokens, naming blocks of tokens, making words.
//! Pure; the same prompt always gets the same answer. May not: know requests or JSON.
//! A token is a word of up to six letters with the space before it; a longer word is several, and
//! an endless one (padding, base64) is cut every 1,024 bytes, so that a body of megabytes is still
//! a prompt of thousands of tokens. Every word made here is exactly one token, so an answer sent
//! back as part of the next prompt finds its blocks in the cache.

use super::cache::BlockHash;

const WORD_BYTES_MAX: usize = 24;
const PIECE_BYTES: usize = 6;
const RUN_BYTES: usize = 1_024;

/// What the model says, one token each with a space before it.
const WORDS: [&str; 64] = [
    "river", "stone", "light", "over", "water", "field", "under", "cloud", "house", "green",
    "early", "wind", "north", "small", "road", "again", "bridge", "quiet", "morn", "leaf", "salt",
    "open", "door", "rain", "grey", "hill", "slow", "bird", "weir", "mill", "flow", "gate", "deep",
    "calm", "reed", "bank", "moss", "lake", "pool", "fall", "spring", "bright", "summer", "winter",
    "autumn", "garden", "paper", "silver", "copper", "iron", "oak", "elm", "ash", "birch", "heron",
    "otter", "trout", "perch", "swift", "wren", "lark", "dove", "crow", "owl",
];

/// Mixes two numbers into one; stable across builds and machines.
pub fn mix(left: u64, right: u64) -> u64 {
    let mut value = left.rotate_left(29) ^ right.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A number for bytes (FNV-1a).
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |value, byte| {
        (value ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The word number `index` of the answer that `seed` makes, with its space.
pub fn word(seed: u64, index: u32, out: &mut String) {
    let which = mix(seed, u64::from(index)) as usize % WORDS.len();
    out.push(' ');
    out.push_str(WORDS[which]);
}

/// A word for a token number, so that numbers can be shown as text.
pub fn word_of_token(token: u64) -> &'static str {
    WORDS[token as usize % WORDS.len()]
}

/// Cuts text into tokens.
pub fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    // Bytes of the present word still to come, and how many make a token.
    let (mut word_left, mut step) = (0usize, PIECE_BYTES);
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let mut end = 0;
        if word_left == 0 {
            let space = usize::from(rest.starts_with(' '));
            let body = &rest.as_bytes()[space..];
            let length = body.iter().position(u8::is_ascii_whitespace).unwrap_or(body.len());
            step = if length > WORD_BYTES_MAX { RUN_BYTES } else { PIECE_BYTES };
            word_left = length;
            end = space;
            if length == 0 && space == 0 {
                end = 1; // a white space that is no space, alone
            }
        }
        end += word_left.min(step);
        while !rest.is_char_boundary(end) {
            end += 1;
        }
        let (piece, after) = rest.split_at(end);
        word_left = word_left.saturating_sub(piece.trim_start_matches(' ').len());
        rest = after;
        Some(piece)
    })
}

/// Counts tokens and names full blocks of them, each by all that came before.
#[derive(Clone, Debug)]
pub struct Fingerprint {
    block_tokens: u32,
    state: u64,
    tokens: u32,
    blocks: Vec<BlockHash>,
}

impl Fingerprint {
    /// Of nothing yet. Texts under different `salt`s never share a block.
    pub fn new(salt: u64, block_tokens: u32) -> Self {
        let state = mix(0x5eed, salt);
        Self { block_tokens: block_tokens.max(1), state, tokens: 0, blocks: Vec::new() }
    }

    /// One more token.
    pub fn push(&mut self, token: u64) {
        self.state = mix(self.state, token);
        self.tokens = self.tokens.saturating_add(1);
        if self.tokens.is_multiple_of(self.block_tokens) {
            self.blocks.push(BlockHash(self.state));
        }
    }

    /// The tokens of a text.
    pub fn push_text(&mut self, text: &str) {
        pieces(text).for_each(|piece| self.push(hash(piece.as_bytes())));
    }

    /// So many words of the answer that `seed` makes.
    pub fn push_answer(&mut self, seed: u64, tokens: u32) {
        let mut text = String::new();
        for index in 0..tokens {
            text.clear();
            word(seed, index, &mut text);
            self.push(hash(text.as_bytes()));
        }
    }

    /// Tokens so far.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// A number for all of it; the seed of the answer.
    pub fn seed(&self) -> u64 {
        self.state
    }

    /// Names of the full blocks.
    pub fn into_blocks(self) -> Vec<BlockHash> {
        self.blocks
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_short_word_with_its_space_is_one_token() {
        let cut: Vec<_> = pieces("The weir  holds\nabcdefghij water").collect();
        assert_eq!(cut, ["The", " weir", " ", " holds", "\n", "abcdef", "ghij", " water"]);
        let padding = format!("see {}", "x".repeat(3_000));
        assert_eq!(pieces(&padding).map(str::len).collect::<Vec<_>>(), [3, 1_025, 1_024, 952]);
    }

    #[test]
    fn each_word_of_an_answer_is_one_token() {
        let mut answer = String::new();
        (0..500).for_each(|index| word(7, index, &mut answer));
        assert_eq!(pieces(&answer).count(), 500);
        let (mut written, mut read) = (Fingerprint::new(1, 16), Fingerprint::new(1, 16));
        written.push_answer(7, 500);
        read.push_text(&answer);
        assert_eq!(written.into_blocks(), read.into_blocks());
    }

    #[test]
    fn blocks_are_equal_up_to_the_first_difference_and_never_after() {
        let of = |salt, text: &str| {
            let mut print = Fingerprint::new(salt, 4);
            print.push_text(text);
            print.into_blocks()
        };
        let (one, two) = (of(0, "a b c d e f g h i j k l"), of(0, "a b c d e X g h i j k l"));
        assert_eq!(one[0], two[0]);
        assert!(one[1] != two[1] && one[2] != two[2]);
        assert_ne!(one[0], of(1, "a b c d")[0], "another tenant's salt");
    }

    proptest! {
        #[test]
        fn tokens_together_are_the_text(text in "\\PC{0,60}|[a-z \n]{0,80}|[xé]{0,2000}") {
            prop_assert_eq!(pieces(&text).collect::<String>(), text);
        }
    }
}
