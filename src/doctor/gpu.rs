//! GPUs, what drives them, and how steady their clocks are.

use cuda::{GpuHealth, Health, Library};

use super::{
    compute,
    direct::{self, Direct},
    host::Host,
    rdma::Device,
};
use crate::doctor::finding::Finding;

/// What NVIDIA's libraries tell of this host.
#[derive(Debug, Clone)]
pub(super) struct Gpus {
    /// The GPUs, or why they cannot be asked.
    pub health: Result<Health, String>,
    /// What backends load to drive them.
    pub libraries: Vec<Library>,
    /// Where those are looked for.
    pub looked_in: String,
    /// What RDMA devices could do with their memory.
    pub direct: Direct,
}

impl Gpus {
    /// This host's.
    #[cfg(feature = "cuda")]
    pub(super) fn here() -> Self {
        let (mut libraries, looked_in) = (cuda::driver::real::libraries(), cuda::driver::real::looked_in());
        libraries.push(cuda::management_library());
        Self { health: cuda::health(), libraries, looked_in, direct: Direct::here() }
    }

    /// What a program that drives none knows of them.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn here() -> Self {
        Self { health: cuda::health(), libraries: Vec::new(), looked_in: String::new(), direct: Direct::here() }
    }
}

/// Everything about GPUs; where the bus has none, two lines.
pub(super) fn check(host: &Host, gpus: &Gpus, devices: &[Device]) -> Vec<Finding> {
    let on_bus = compute::gpus(host);
    let health = match &gpus.health {
        Err(reason) if reason == cuda::WITHOUT_GPUS && on_bus.is_empty() => {
            return vec![Finding::ok("GPUs", format!("none; {reason}"))];
        }
        Err(reason) if reason == cuda::WITHOUT_GPUS => {
            let found = format!("{} on the PCI bus, which nothing uses", on_bus.len());
            return vec![Finding::advice("GPUs", found, reason)];
        }
        Ok(health) if !health.gpus.is_empty() => health,
        _ if on_bus.is_empty() => {
            let found = "none: ONNX models run on the CPU here";
            return vec![Finding::ok("GPUs", found), all_libraries(gpus)];
        }
        found => {
            let reason = found.as_ref().map_or_else(Clone::clone, |_| "NVML lists none".to_owned());
            let found = format!("{} on the PCI bus, and {reason}", on_bus.len());
            let remedy = "install NVIDIA's driver, 580 or later; in a container, pass the GPUs to it";
            let missing = Finding::advice("GPUs", found, remedy);
            let missing = [missing, all_libraries(gpus)].into_iter();
            return missing.chain(compute::numa(&on_bus, devices)).collect();
        }
    };
    let mut findings = vec![driver(&health.driver)];
    findings.extend(gpus.libraries.iter().map(library));
    for (number, gpu) in health.gpus.iter().enumerate() {
        findings.push(about(number, gpu));
        findings.extend(clocks(number, gpu));
        findings.extend(errors(number, gpu));
    }
    findings.extend(compute::numa(&on_bus, devices));
    let places: Vec<&str> = health.gpus.iter().map(|gpu| gpu.pci.as_str()).collect();
    findings.extend(direct::check(host, &gpus.direct, &places, devices));
    findings
}

/// All of them in one line: without a GPU none is missed.
fn all_libraries(gpus: &Gpus) -> Finding {
    let listed = |texts: Vec<&str>| if texts.is_empty() { "none".to_owned() } else { texts.join(", ") };
    let found = gpus.libraries.iter().filter_map(|library| library.found.as_deref().ok());
    let missing = gpus.libraries.iter().filter(|library| library.found.is_err()).map(|library| library.file);
    let (found, missing) = (listed(found.collect()), listed(missing.collect()));
    Finding::ok("CUDA libraries", format!("found: {found}; not usable: {missing}; looked for in {}", gpus.looked_in))
}

fn driver(version: &str) -> Finding {
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    if major.is_some_and(|major| major < 580) {
        let remedy = "GPUs cannot be used: install 580 or later";
        return Finding::advice("NVIDIA driver", version, remedy);
    }
    Finding::ok("NVIDIA driver", version)
}

fn library(Library { name, found, .. }: &Library) -> Finding {
    match found {
        Ok(found) => Finding::ok(*name, found),
        Err(reason) => Finding::advice(*name, reason, "executor = \"cuda\" does not start without it (docs/gpu.md)"),
    }
}

fn about(number: usize, gpu: &GpuHealth) -> Finding {
    let GpuHealth { name, uuid, memory_bytes, temperature_c, .. } = gpu;
    let memory = memory_bytes.map(|(all, used)| format!(", {} of {} MiB in use", used >> 20, all >> 20));
    let heat = temperature_c.map(|heat| format!(", {heat} C"));
    let split = if gpu.is_split == Some(true) { ", split into instances: name these (MIG-..)" } else { "" };
    let found = format!("{name}, {uuid}{}{}{split}", memory.unwrap_or_default(), heat.unwrap_or_default());
    Finding::ok(format!("GPU {number}"), found)
}

/// Windows are kept by predictions, which clocks that move make wrong.
fn clocks(number: usize, gpu: &GpuHealth) -> Vec<Finding> {
    let mut findings = Vec::new();
    let held_back_by: Vec<String> = gpu.held_back_by.iter().flatten().map(ToString::to_string).collect();
    if let Some((now, most)) = gpu.clock_mhz {
        let found = format!("{now} MHz of at most {most}");
        if held_back_by.is_empty() {
            let remedy = "lock them at what the GPU keeps under load, so that batches take as long as predicted; the \
                          command locks the highest";
            let command = format!("nvidia-smi -i {number} --lock-gpu-clocks={most}");
            findings.push(Finding::advice(format!("clocks of GPU {number}"), found, remedy).with_commands([command]));
        } else {
            let found = format!("{found}, held back by {}", held_back_by.join(", "));
            let remedy = "batches take longer than predicted: see to cooling and power, or lock lower clocks";
            findings.push(Finding::advice(format!("clocks of GPU {number}"), found, remedy));
        }
    }
    if gpu.is_persistent == Some(false) {
        let remedy = "the driver lets go of an idle GPU, and the next start waits for it";
        let finding = Finding::advice(format!("persistence of GPU {number}"), "off", remedy);
        findings.push(finding.with_commands([format!("nvidia-smi -i {number} -pm 1")]));
    }
    if gpu.is_exclusive == Some(false) {
        let remedy = "whoever else uses it makes batches late; exclusive mode keeps others out";
        let finding = Finding::advice(format!("compute mode of GPU {number}"), "shared", remedy);
        findings.push(finding.with_commands([format!("nvidia-smi -i {number} -c EXCLUSIVE_PROCESS")]));
    }
    findings
}

fn errors(number: usize, gpu: &GpuHealth) -> Option<Finding> {
    let errors = gpu.uncorrected_errors.filter(|&errors| errors > 0)?;
    let remedy = "answers may be wrong: drain the host, and have the GPU reset or replaced";
    Some(Finding::advice(format!("memory of GPU {number}"), format!("{errors} errors not corrected"), remedy))
}
