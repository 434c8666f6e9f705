//! The file as it is written.

use serde::Deserialize;

use super::{ArrivalProcess, dynamic};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub gpus: u32,
    #[serde(default)]
    pub gpu_kinds: Vec<GpuKind>,
    #[serde(default = "default_seconds")]
    pub seconds: f64,
    #[serde(default = "default_arrivals")]
    pub arrivals: ArrivalProcess,
    #[serde(default)]
    pub popularity: Popularity,
    pub memory: Option<Memory>,
    pub functions: Option<Functions>,
    #[serde(default)]
    pub network: Network,
    #[serde(default)]
    pub faults: Faults,
    #[serde(default)]
    pub reestimate: bool,
    #[serde(default, rename = "model")]
    pub models: Vec<Model>,
    #[serde(default, rename = "graph")]
    pub graphs: Vec<Graph>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Graph {
    pub name: String,
    pub slo_ms: f64,
    pub share: Option<f64>,
    pub selection: Option<String>,
    pub steps: Vec<Step>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Step {
    pub model: String,
    #[serde(default)]
    pub after: Vec<String>,
    pub chance: Option<f64>,
    pub by: Option<f64>,
}

fn default_seconds() -> f64 {
    60.0
}

fn default_arrivals() -> ArrivalProcess {
    ArrivalProcess::Poisson
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GpuKind {
    pub count: u32,
    pub factor: f64,
}

#[derive(Deserialize, Default, Clone, Copy)]
#[serde(rename_all = "lowercase")]
pub(super) enum Popularity {
    #[default]
    Equal,
    Zipf(f64),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Memory {
    pub gpu_mb: f64,
    pub pcie_gbps: Option<f64>,
    pub host_mb: Option<f64>,
    pub disk_gbps: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Functions {
    pub count: Option<usize>,
    pub minutes: Option<usize>,
    pub rates: Option<String>,
    #[serde(default)]
    pub assignment: HotModels,
    #[serde(default)]
    pub seed: u64,
}

#[derive(Deserialize, Default, Clone, Copy, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(super) enum HotModels {
    #[default]
    Random,
    Lucky,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Network {
    pub ctrl_us: f64,
    pub data_us_per_request: f64,
    pub resp_us: f64,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct Faults {
    #[serde(default)]
    pub execution_jitter: f64,
    #[serde(default)]
    pub load_jitter: f64,
    pub gpu_up_s: Option<f64>,
    pub gpu_down_s: Option<f64>,
    pub gpu_slowdown: Option<f64>,
    pub slow_from_s: Option<f64>,
    pub slow_gpus: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Model {
    pub name: Option<String>,
    pub alpha_ms: Option<f64>,
    pub beta_ms: Option<f64>,
    pub latency_ms: Option<Vec<f64>>,
    pub slo_ms: Option<f64>,
    #[serde(default)]
    pub background: bool,
    pub classes: Option<Vec<Class>>,
    pub max_batch: Option<usize>,
    pub count: Option<usize>,
    pub share: Option<f64>,
    pub zoo: Option<String>,
    pub gpu_price: Option<f64>,
    pub weights_mb: Option<f64>,
    pub load_ms: Option<f64>,
    pub dynamic_mb: Option<f64>,
    pub clients: Option<u32>,
    pub cost: Option<dynamic::raw::Cost>,
    pub applications: Option<Vec<dynamic::raw::Application>>,
    pub slo_x_p99: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Class {
    pub slo_ms: Option<f64>,
    #[serde(default)]
    pub background: bool,
    pub share: Option<f64>,
}
