"""The digit whose mean image is nearest; the farther another one's is, the less probable it is."""

import pathlib

import downbeat
import numpy as np

# A squared distance by which a digit is e times less probable.
SCALE = 100.0


class Nearest(downbeat.Model):
    def load(self, context: downbeat.Context) -> None:
        self.means = np.load(pathlib.Path(context.file).with_name("means.npy"))

    def predict(self, batch):
        distances = ((batch["image"][:, np.newaxis] - self.means) ** 2).sum(axis=2)
        nearest = distances.min(axis=1, keepdims=True)
        scores = np.exp((nearest - distances) / SCALE)
        return {"probabilities": (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)}
