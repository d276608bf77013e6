//! What an operator may say about answers and who wants a copy. Only settings and defaults here.
//! To add one: a field with a doc comment (meaning, unit, default), its line in `Default`, and its
//! rule in `faults` if not every value is a good one.

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

/// The `response` section of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Counting of tokens from what engines report. Default: on.
    pub usage: UsageOptions,
    /// The most bytes of one answer that are kept for a consumer; a longer answer is passed on all
    /// the same, and the consumer goes without. Default: 8MiB.
    pub buffer_bytes_max: ByteSize,
    /// The most bytes of all answers together that are kept at one time. Default: 256MiB.
    pub budget_bytes: ByteSize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            usage: UsageOptions::default(),
            buffer_bytes_max: ByteSize::mib(8),
            budget_bytes: ByteSize::mib(256),
        }
    }
}

impl Options {
    /// What is wrong with these settings, each beginning with the path of its key inside the
    /// section. Empty when all is well.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.buffer_bytes_max > self.budget_bytes {
            faults.push(format!(
                "buffer_bytes_max: {} is more than budget_bytes, {}",
                self.buffer_bytes_max, self.budget_bytes
            ));
        }
        faults
    }
}

/// The `response.usage` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UsageOptions {
    /// Whether prompt, completion and cached tokens are counted from the engines' answers.
    /// Answers that are not streamed are then kept until their end, within the limits above;
    /// streams are read as they pass, and nothing of them is kept. Default: true.
    pub enabled: bool,
}

impl Default for UsageOptions {
    fn default() -> Self {
        Self { enabled: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_section_is_the_default() {
        let options: Options = serde_json::from_str("{}").unwrap();
        assert_eq!(options, Options::default());
        assert_eq!(options.faults(), Vec::<String>::new());
    }

    #[test]
    fn sizes_are_written_with_units() {
        let text = r#"{"buffer_bytes_max":"1MiB","budget_bytes":"2MiB","usage":{"enabled":false}}"#;
        let options: Options = serde_json::from_str(text).unwrap();
        assert_eq!(options.buffer_bytes_max.as_u64(), 1 << 20);
        assert!(!options.usage.enabled);
    }

    #[test]
    fn a_misspelt_key_is_refused() {
        assert!(serde_json::from_str::<Options>(r#"{"buffer_max":"1MiB"}"#).is_err());
        assert!(serde_json::from_str::<Options>(r#"{"usage":{"on":true}}"#).is_err());
    }

    #[test]
    fn one_answer_may_use_the_whole_budget_but_not_more() {
        let mut options = Options { budget_bytes: ByteSize::mib(8), ..Options::default() };
        assert_eq!(options.faults(), Vec::<String>::new());
        options.budget_bytes = ByteSize::b((8 << 20) - 1);
        assert!(options.faults()[0].starts_with("buffer_bytes_max: "));
    }
}
