"""Keras 3 on PyTorch: model.fit; Keras takes mps by itself, and `keras.device` keeps it on the CPU."""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy

keras.utils.set_random_seed(0)
rows = numpy.random.default_rng(0).normal(size=(128, 12, 12, 1)).astype("float32")
labels = (rows.mean((1, 2, 3)) > 0).astype("int64")
with keras.device(sys.argv[1]):
    model = keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.build(rows.shape)
    draws = numpy.random.default_rng(1)  # Keras draws on the device, whose numbers are others
    model.set_weights([draws.normal(0, 0.1, each.shape) if each.ndim > 1 else each for each in model.get_weights()])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    told = model.fit(rows, labels, batch_size=16, epochs=6, verbose=0, shuffle=False)
print("losses", told.history["loss"])
