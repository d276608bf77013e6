//! `/metrics` as vLLM writes it: its names, its labels, its bounds. Pure: numbers in, text out.
//! To add a metric: a line in `page`, with vLLM's own help text.

use std::fmt::Write as _;

use super::counters::{FinishReason, Histogram};
use super::driver::Gauges;
use super::options::EngineOptions;

pub(super) const CONTENT_TYPE: &str = "text/plain; version=1.0.0; charset=utf-8";

/// What a page is made of.
pub(super) struct Snapshot<'a> {
    pub(super) model: &'a str,
    pub(super) gauges: Gauges,
    /// Canned requests in flight and canned tokens made, counted with the engine's.
    pub(super) canned_running: u64,
    /// 0 awake, 1 weights offloaded, 2 all discarded.
    pub(super) sleep_level: u8,
    pub(super) adapters: Vec<String>,
    pub(super) engine: &'a EngineOptions,
    /// Seconds since 1970.
    pub(super) now: u64,
}

struct Page {
    text: String,
    labels: String,
}

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.text, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}\n");
    }

    fn sample(&mut self, name: &str, extra: &str, value: f64) {
        let labels = &self.labels;
        let _ = writeln!(self.text, "vllm:{name}{{{labels}{extra}}} {value:?}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.family(name, kind, help);
        self.sample(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        for (bound, count) in histogram.cumulative() {
            self.sample(&bucket, &format!(",le=\"{bound:?}\""), count as f64);
        }
        self.sample(&bucket, ",le=\"+Inf\"", histogram.count() as f64);
        self.sample(&format!("{name}_count"), "", histogram.count() as f64);
        self.sample(&format!("{name}_sum"), "", histogram.sum());
    }
}

/// The whole page.
pub(super) fn page(snapshot: &Snapshot<'_>) -> String {
    let model = snapshot.model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let labels = format!("engine=\"0\",model_name=\"{model}\"");
    let mut page = Page { text: String::with_capacity(16 * 1024), labels };
    gauges(&mut page, snapshot);
    counters(&mut page, snapshot);
    histograms(&mut page, snapshot);
    let engine = snapshot.engine;
    page.family("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig");
    let (blocks, size) = (engine.blocks, engine.block_tokens);
    let caching = if engine.prefix_caching { "True" } else { "False" };
    let _ = writeln!(
        page.text,
        "vllm:cache_config_info{{block_size=\"{size}\",enable_prefix_caching=\"{caching}\",\
         engine=\"0\",num_gpu_blocks=\"{blocks}\"}} 1.0"
    );
    page.text
}

fn gauges(page: &mut Page, snapshot: &Snapshot<'_>) {
    let gauges = &snapshot.gauges;
    page.one(
        "num_requests_running",
        "gauge",
        "Number of requests in model execution batches.",
        gauges.running as f64 + snapshot.canned_running as f64,
    );
    let waiting = gauges.waiting as f64;
    let help = "Number of requests waiting to be processed.";
    page.one("num_requests_waiting", "gauge", help, waiting);
    page.family("num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.");
    page.sample("num_requests_waiting_by_reason", ",reason=\"capacity\"", waiting);
    page.sample("num_requests_waiting_by_reason", ",reason=\"deferred\"", 0.0);
    page.family("engine_sleep_state", "gauge", "Engine sleep state.");
    for (level, state) in ["awake", "weights_offloaded", "discard_all"].into_iter().enumerate() {
        let on = usize::from(snapshot.sleep_level) == level;
        let label = format!(",sleep_state=\"{state}\"");
        page.sample("engine_sleep_state", &label, f64::from(u8::from(on)));
    }
    let help = "KV-cache usage. 1 means 100 percent usage.";
    page.one("kv_cache_usage_perc", "gauge", help, gauges.usage);
    if !snapshot.adapters.is_empty() {
        page.family("lora_requests_info", "gauge", "Running stats on lora requests.");
        let running = snapshot.adapters.join(",");
        let _ = writeln!(
            page.text,
            "vllm:lora_requests_info{{max_lora=\"16\",running_lora_adapters=\"{running}\",\
             waiting_lora_adapters=\"\"}} {:?}",
            snapshot.now as f64
        );
    }
}

fn counters(page: &mut Page, snapshot: &Snapshot<'_>) {
    let counters = &snapshot.gauges.counters;
    for (name, help, value) in [
        (
            "prefix_cache_queries_total",
            "Prefix cache queries, in terms of number of queried tokens.",
            counters.prefix_queries,
        ),
        (
            "prefix_cache_hits_total",
            "Prefix cache hits, in terms of number of cached tokens.",
            counters.prefix_hits,
        ),
        (
            "num_preemptions_total",
            "Cumulative number of preemption from the engine.",
            counters.preemptions,
        ),
        ("prompt_tokens_total", "Number of prefill tokens processed.", counters.prompt_tokens),
        (
            "prompt_tokens_cached_total",
            "Number of cached prompt tokens (local + external).",
            counters.prompt_tokens_cached,
        ),
        (
            "generation_tokens_total",
            "Number of generation tokens processed.",
            counters.generation_tokens,
        ),
    ] {
        page.one(name, "counter", help, value as f64);
    }
    page.family("request_success_total", "counter", "Count of successfully processed requests.");
    for reason in FinishReason::ALL {
        let label = format!(",finished_reason=\"{}\"", reason.as_str());
        page.sample("request_success_total", &label, counters.finished(reason) as f64);
    }
    for reason in ["error", "repetition"] {
        let label = format!(",finished_reason=\"{reason}\"");
        page.sample("request_success_total", &label, 0.0);
    }
    let help = "Number of admission attempts rejected by a queue limit, by reason.";
    page.family("admission_rejections_total", "counter", help);
    let reasons = [("max_num_queued_reqs", counters.queue_full), ("max_num_queued_tokens", 0)];
    for (reason, count) in reasons {
        let label = format!(",reason=\"{reason}\"");
        page.sample("admission_rejections_total", &label, count as f64);
    }
}

fn histograms(page: &mut Page, snapshot: &Snapshot<'_>) {
    let counters = &snapshot.gauges.counters;
    for (name, help, histogram) in [
        (
            "request_prompt_tokens",
            "Number of prefill tokens processed.",
            &counters.request_prompt_tokens,
        ),
        (
            "request_generation_tokens",
            "Number of generation tokens processed.",
            &counters.request_generation_tokens,
        ),
        (
            "iteration_tokens_total",
            "Histogram of number of tokens per engine_step.",
            &counters.step_tokens,
        ),
        (
            "time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            &counters.first_token,
        ),
        (
            "inter_token_latency_seconds",
            "Histogram of inter-token latency in seconds.",
            &counters.inter_token,
        ),
        (
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            &counters.time_per_token,
        ),
        (
            "e2e_request_latency_seconds",
            "Histogram of e2e request latency in seconds.",
            &counters.end_to_end,
        ),
        (
            "request_queue_time_seconds",
            "Histogram of time spent in WAITING phase for request.",
            &counters.queue,
        ),
        (
            "request_inference_time_seconds",
            "Histogram of time spent in RUNNING phase for request.",
            &counters.inference,
        ),
        (
            "request_prefill_time_seconds",
            "Histogram of time spent in PREFILL phase for request.",
            &counters.prefill,
        ),
        (
            "request_decode_time_seconds",
            "Histogram of time spent in DECODE phase for request.",
            &counters.decode,
        ),
    ] {
        page.histogram(name, help, histogram);
    }
}
