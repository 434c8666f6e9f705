"""What others make of a network in FP16 on this GPU: PyTorch's captured graph, torch.compile and ONNX Runtime."""

import importlib.util
import pathlib
import tempfile
import time

import torch

from exports import export

RUNS = 200
# ONNX Runtime is timed by the host's clock.
ONNX_RUNTIME = "ONNX Runtime"


def of(net, model, batches):
    """For each batch size milliseconds by name, or why there are none; PyTorch's graph there is always."""
    model = model.cuda().half()
    if net.INPUT == "image":
        model = model.to(memory_format=torch.channels_last)
    found = {}
    for batch in batches:
        inputs = on_gpu(net.inputs(batch))
        found[batch] = {
            "PyTorch's graph": graph_ms(model, inputs),
            "torch.compile": tried(lambda: compiled_ms(model, inputs)),
            ONNX_RUNTIME: tried(lambda: onnxruntime_ms(net, model, inputs)),
        }
    return found


def on_gpu(inputs):
    if not inputs.is_floating_point():
        return inputs.cuda()
    return inputs.cuda().half().to(memory_format=torch.channels_last)


def tried(measure):
    """What is not there, or does not work, is said and no more."""
    try:
        return measure()
    except Exception as error:  # Whatever it is, ours are judged without it.
        return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


def beside(own, whole, peer, found):
    """One peer's part of a line; `whole` is the host's time for ours, in milliseconds as `own`."""
    if isinstance(found, str):
        return f"no {peer} ({found})"
    ours = whole if peer == ONNX_RUNTIME else own
    return f"{ours / found:.2f} of {peer} ({found:.3f} ms)"


def median_ms(run):
    """By the GPU's stamps."""
    times = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[RUNS // 2]


def graph_ms(model, inputs):
    """A captured graph's runs."""
    with torch.no_grad():
        # Capture wants what was run before to have run on another stream than the first one.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(inputs)
    return median_ms(graph.replay)


def compiled_ms(model, inputs):
    """Compiled for these inputs alone, and launched as graphs."""
    torch.compiler.reset()
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        for _ in range(5):
            compiled(inputs)
        return median_ms(lambda: compiled(inputs))


def onnxruntime_ms(net, model, inputs, device="cuda"):
    """Inputs and outputs lie on the GPU; as a CUDA graph if it takes the network so. Its device may be `cpu`, too."""
    if importlib.util.find_spec("onnxruntime") is None:
        return "needs onnxruntime-gpu"
    import onnxruntime

    # It finds libraries that came by pip only if it is told to.
    getattr(onnxruntime, "preload_dlls", lambda: None)()
    with torch.no_grad():
        outputs = model(inputs)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "model.onnx")
        export(net, model, inputs.contiguous(), file, is_batched=False)
        session = session_of(onnxruntime, file, device)
    binding = session.io_binding()
    given, room = (tensor.cpu().contiguous().numpy() for tensor in [inputs, outputs])
    binding.bind_ortvalue_input(net.INPUT, onnxruntime.OrtValue.ortvalue_from_numpy(given, device, 0))
    binding.bind_ortvalue_output(net.OUTPUT, onnxruntime.OrtValue.ortvalue_from_numpy(room, device, 0))
    times = []
    for _ in range(RUNS + 5):
        begin = time.perf_counter()
        session.run_with_iobinding(binding)
        times.append(time.perf_counter() - begin)
    return sorted(times[5:])[RUNS // 2] * 1e3


def session_of(onnxruntime, file, device):
    """It refuses graphs of networks that it would compute in part on the CPU."""
    if device == "cpu":
        return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise RuntimeError("needs onnxruntime-gpu")
    session = None
    for options in [{"enable_cuda_graph": "1"}, {}]:
        try:
            session = onnxruntime.InferenceSession(file, providers=[("CUDAExecutionProvider", options)])
            break
        except Exception:  # What it is says the next one.
            if not options:
                raise
    if "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("its CUDA provider does not start here")
    return session
