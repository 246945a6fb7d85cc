"""The twin of train.py in TensorFlow, for those who have Keras code: TPUStrategy, warmup, LARS, images a second first.

A hundred steps tell what a machine is worth; then the same trainer runs as long as it should:

    python -m tpukit job examples/train_tensorflow.py --target vertex --args '["gs://my-bucket/train*.tfrec"]' ...

It is a script, so the image needs TensorFlow and no tpukit: Dockerfile.tensorflow. Each record of the TFRecord files has
an `image`, a JPEG, and its `class`, a number from 0. On a computer without a TPU two CPU devices stand in for its cores:

    python examples/train_tensorflow.py 'records/*.tfrec' --rehearse --steps 4 --batch-size 8 --size 32
"""

import argparse
import glob
import json
import os
import time
from pathlib import Path

import keras
import tensorflow as tf


class LARS(keras.optimizers.Optimizer):
    """SGD with momentum and a rate of its own for every layer (arXiv:1708.03888), as tpukit.LARS has it."""

    def __init__(self, learning_rate, momentum=0.9, decay=5e-5, trust=0.001):
        super().__init__(learning_rate, name="lars")
        self.momentum, self.decay, self.trust = momentum, decay, trust

    def build(self, variables):
        """Make the momentum of each variable."""
        if not self.built:
            super().build(variables)
            self.momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        """Change one variable by one step; biases and BatchNorm's take plain steps without decay."""
        rate = tf.cast(learning_rate, variable.dtype)
        if len(variable.shape) > 1:
            size, slope = tf.norm(variable), tf.norm(gradient)
            ratio = self.trust * size / (slope + self.decay * size)
            rate *= tf.where((size > 0) & (slope > 0), ratio, 1.0)
            gradient += self.decay * variable
        momentum = self.momentums[self._get_variable_index(variable)]
        self.assign(momentum, self.momentum * momentum + rate * gradient)
        self.assign_sub(variable, momentum)

    def get_config(self):
        """Return what a saved model needs to make it again."""
        own = {"momentum": self.momentum, "decay": self.decay, "trust": self.trust}
        return {"learning_rate": keras.optimizers.schedules.serialize(self._learning_rate), **own}


class Speed(keras.callbacks.Callback):
    """Images a second of the last epoch, without its first execution, in which graphs are compiled."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size, self.images_per_second = batch_size, None

    def on_epoch_begin(self, epoch, logs=None):
        """Forget the epoch before."""
        self.first = None

    def on_train_batch_end(self, batch, logs=None):
        """Look at the clock; `logs` are numbers, so the steps before are done."""
        now = time.monotonic()
        self.first = self.first or (batch, now)
        steps, seconds = batch - self.first[0], now - self.first[1]
        if steps:
            self.images_per_second = round(steps * self.batch_size / seconds, 1)


def find_strategy(rehearse: bool):
    """Return TPUStrategy over all cores of this machine's TPU; to rehearse, MirroredStrategy over two CPU devices."""
    if rehearse:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (tf.errors.OpError, ValueError) as error:  # never on the CPU instead: a job would pay for a TPU
        said = str(error).splitlines()[0]
        raise SystemExit(f"TensorFlow starts no TPU here\n  found: {said}\n  fix:   --rehearse, or a TPU VM") from None


def mounted(address: str) -> str:
    """Return gs://bucket/path as a Vertex AI job sees it, /gcs/bucket/path, and any other path as it is."""
    return f"/gcs/{address.removeprefix('gs://')}" if address.startswith("gs://") else address


def read(pattern: str, batch_size: int, size: int, *, train: bool):
    """Return batches of (N, size, size, 3) uint8 and (N,) int64; the images that fill no batch are left out."""
    files = sorted(glob.glob(mounted(pattern)))
    if not files:
        raise SystemExit(f"no such files: {mounted(pattern)}\n  fix:   a pattern that finds TFRecord files")
    features = {"image": tf.io.FixedLenFeature([], tf.string), "class": tf.io.FixedLenFeature([], tf.int64)}

    def example(record):
        one = tf.io.parse_single_example(record, features)
        pixels = tf.image.resize(tf.io.decode_jpeg(one["image"], channels=3), (size, size), antialias=True)
        return tf.cast(tf.round(pixels), tf.uint8), one["class"]  # as bytes to the device: a quarter of the copy

    records = tf.data.TFRecordDataset(files, num_parallel_reads=tf.data.AUTOTUNE)
    records = records.shuffle(10_000).repeat() if train else records
    batches = records.map(example, tf.data.AUTOTUNE).batch(batch_size, drop_remainder=True)
    return batches.prefetch(tf.data.AUTOTUNE)


def resnet18(size: int, classes: int):
    """Return a ResNet-18 for bytes, with the logits in float32."""
    layers = keras.layers
    convolve = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}

    def block(x, width, stride):
        y = layers.Conv2D(width, 3, stride, **convolve)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(width, 3, **convolve)(y))
        if stride > 1 or x.shape[-1] != width:
            x = layers.BatchNormalization()(layers.Conv2D(width, 1, stride, **convolve)(x))
        return layers.ReLU()(x + y)

    inputs = layers.Input((size, size, 3), dtype="uint8")
    x = layers.Conv2D(64, 7, 2, **convolve)(layers.Rescaling(1 / 255)(inputs))
    x = layers.MaxPooling2D(3, 2, "same")(layers.ReLU()(layers.BatchNormalization()(x)))
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        x = block(block(x, width, stride), width, 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, dtype="float32")(x))


def main() -> None:
    """Train, save, and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("train", help="pattern of the TFRecord files, gs://bucket/... or a path")
    parser.add_argument("--valid", help="pattern of those to validate with after each epoch")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128, help="of one core")
    parser.add_argument("--size", type=int, default=128, help="pixels of a side")
    parser.add_argument("--rehearse", action="store_true", help="on two CPU devices in place of a TPU")
    given = parser.parse_args()

    strategy = find_strategy(given.rehearse)
    cores = strategy.num_replicas_in_sync
    batch_size, steps = given.batch_size * cores, given.steps * given.epochs
    print(f"{type(strategy).__name__}, {cores} cores, batches of {batch_size}", flush=True)

    # The rate grows with the batch, so it must be reached slowly: Goyal and others, arXiv:1706.02677.
    peak, warmup = 3.0 * batch_size / 256, steps // 10
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps - warmup, warmup_target=peak, warmup_steps=warmup)
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    with strategy.scope():
        model = resnet18(given.size, given.classes)
        model.compile(
            LARS(rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=max(1, min(20, given.steps // 2)),  # the host speaks to the TPU once for them all
            jit_compile=False,  # TPUStrategy compiles for itself; Keras's own compiling fails there: keras 19448
        )
    speed = Speed(batch_size)
    checkpoints = mounted(os.environ.get("AIP_CHECKPOINT_DIR") or "runs/checkpoints")
    folder = Path(checkpoints) / f"{given.steps}x{given.epochs}"  # the hundred steps are a run of their own
    history = model.fit(
        read(given.train, batch_size, given.size, train=True),
        validation_data=read(given.valid, batch_size, given.size, train=False) if given.valid else None,
        epochs=given.epochs,
        steps_per_epoch=given.steps,
        callbacks=[speed, keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)],
        verbose=2,
    )
    models = Path(mounted(os.environ.get("AIP_MODEL_DIR") or "runs/model"))
    models.mkdir(parents=True, exist_ok=True)
    model.save(models / "model.keras")
    last = {name: round(values[-1], 4) for name, values in history.history.items()}
    print(json.dumps({"images_per_second": speed.images_per_second, "epochs": len(history.epoch), **last}), flush=True)


if __name__ == "__main__":
    main()
