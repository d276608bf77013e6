//! `/metrics`, read.

use std::collections::BTreeMap;

/// One scrape.
#[derive(Clone, Debug)]
pub struct Metrics {
    text: String,
    series: Vec<(String, BTreeMap<String, String>, f64)>,
}

impl Metrics {
    /// Reads Prometheus' text format; complains about what is none.
    pub fn read(text: String) -> Self {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let series = lines.map(read_line).collect();
        Self { text, series }
    }

    /// The text as it came.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Sum over the series of a name that have these labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.values(name, labels).iter().sum()
    }

    /// The values of these series.
    pub fn values(&self, name: &str, labels: &[(&str, &str)]) -> Vec<f64> {
        let fits = |own: &BTreeMap<String, String>| {
            labels.iter().all(|(key, value)| own.get(*key).is_some_and(|own| own == value))
        };
        let named = self.series.iter().filter(|(own, had, _)| own == name && fits(had));
        named.map(|(_, _, value)| *value).collect()
    }

    /// How many requests and leases have not ended, and how many bytes are kept.
    pub fn unfinished(&self) -> Vec<(String, f64)> {
        let gauges = self.series.iter().filter(|(name, _, value)| {
            let kept = ["weir_buffered_bytes", "weir_request_bodies_bytes"];
            *value != 0.0 && (name.contains("in_flight") || kept.contains(&name.as_str()))
        });
        gauges.map(|(name, labels, value)| (format!("{name}{labels:?}"), *value)).collect()
    }

    /// How many series there are.
    pub fn count(&self) -> usize {
        self.series.len()
    }
}

fn read_line(line: &str) -> (String, BTreeMap<String, String>, f64) {
    let bad = || panic!("not a sample: {line}");
    let (key, value) = line.rsplit_once(' ').unwrap_or_else(bad);
    let value = value.parse().unwrap_or_else(|_| panic!("not a number: {line}"));
    let Some((name, labels)) = key.split_once('{') else {
        return (key.to_owned(), BTreeMap::new(), value);
    };
    let labels = labels.strip_suffix('}').unwrap_or_else(|| panic!("not a sample: {line}"));
    let mut read = BTreeMap::new();
    for pair in labels.split("\",").filter(|pair| !pair.is_empty()) {
        let (label, value) = pair.split_once("=\"").unwrap_or_else(bad);
        read.insert(label.to_owned(), value.trim_end_matches('"').to_owned());
    }
    (name.to_owned(), read, value)
}
