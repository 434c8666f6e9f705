//! GPUs, what drives them, and how steady their clocks are.

use cuda::{GpuHealth, Health};

use super::{Finding, compute, host::Host, rdma::Device};

/// What NVIDIA's libraries tell of this host.
#[derive(Debug, Clone)]
pub(super) struct Gpus {
    /// The GPUs, or why they cannot be asked.
    pub health: Result<Health, String>,
    /// What backends load to drive them: what each is called, and where it was found, or where it was looked for.
    pub libraries: Vec<(String, Result<String, String>)>,
}

impl Gpus {
    /// This host's.
    pub(super) fn here() -> Self {
        let libraries = cuda::driver::real::libraries().into_iter();
        let libraries = libraries.map(|library| (library.name.to_owned(), library.found)).collect();
        Self { health: cuda::health(), libraries }
    }
}

/// Everything about GPUs; where the bus has none, that is all there is to say.
pub(super) fn check(host: &Host, gpus: &Gpus, devices: &[Device]) -> Vec<Finding> {
    let on_bus = compute::gpus(host);
    let health = match &gpus.health {
        Ok(health) if !health.gpus.is_empty() => health,
        _ if on_bus.is_empty() => {
            let found = "none: ONNX models run on the CPU here (executor = \"cpu\")";
            return vec![Finding::ok("GPUs", found)];
        }
        found => {
            let reason = found.as_ref().map_or_else(Clone::clone, |_| "NVML lists none".to_owned());
            let found = format!("{} on the PCI bus, and {reason}", on_bus.len());
            let remedy = "install NVIDIA's driver, 580 or later; in a container, pass the GPUs to it";
            let missing = Finding::advice("GPUs", found, remedy);
            return std::iter::once(missing).chain(compute::numa(&on_bus, devices)).collect();
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
    findings
}

fn driver(version: &str) -> Finding {
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    if major.is_some_and(|major| major < 580) {
        let remedy = "GPUs cannot be used: install 580 or later";
        return Finding::advice("NVIDIA driver", version, remedy);
    }
    Finding::ok("NVIDIA driver", version)
}

fn library((name, found): &(String, Result<String, String>)) -> Finding {
    match found {
        Ok(found) => Finding::ok(name, found),
        Err(reason) => Finding::advice(name, reason, "executor = \"cuda\" does not start without it (docs/gpu.md)"),
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
    if let Some((now, most)) = gpu.clock_mhz {
        let found = format!("{now} MHz of at most {most}");
        if gpu.held_back_by.is_empty() {
            let remedy = "lock them at what the GPU keeps under load, so that batches take as long as predicted; the \
                          command locks the highest";
            let command = format!("nvidia-smi -i {number} --lock-gpu-clocks={most}");
            findings.push(Finding::advice(format!("clocks of GPU {number}"), found, remedy).with_commands([command]));
        } else {
            let found = format!("{found}, held back by {}", gpu.held_back_by.join(", "));
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
