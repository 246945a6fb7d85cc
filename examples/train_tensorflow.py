"""The twin of train.py in TensorFlow, for those who have Keras code: TPUStrategy, warmup, LARS, images a second first.

A hundred steps tell what a machine is worth; then the same trainer runs as long as it should:

    python -m tpukit job examples/train_tensorflow.py --target vertex --args '["gs://my-bucket/train*.tfrec"]' \\
        --needs tensorflow=tensorflow-tpu==2.19.1 --needs keras=tensorflow-tpu==2.19.1 ...

It is a script, so its image has TensorFlow and needs no tpukit: Dockerfile.tensorflow. Each record of the TFRecord
files has an `image`, a JPEG, and its `class`, a number from 0. Without a TPU, two CPU devices stand in for its cores:

    python examples/train_tensorflow.py 'records/*.tfrec' --rehearse --steps 4 --batch-size 8 --size 32
"""

import argparse
import glob
import json
import os
import time
from importlib.util import find_spec
from pathlib import Path

if find_spec("libtpu"):  # from v5e on TensorFlow reaches the chips through PJRT, and has to be told; before, "false"
    import libtpu

    os.environ.setdefault("NEXT_PLUGGABLE_DEVICE_USE_C_API", "true")
    os.environ.setdefault("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", libtpu.get_library_path())

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402


class LARS(keras.optimizers.Optimizer):
    """SGD with momentum and a rate of its own for every layer (arXiv:1708.03888), as tpukit.train.LARS has it."""

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


def find_strategy(rehearse: bool):
    """Return TPUStrategy over all cores of this machine's TPU; to rehearse, MirroredStrategy over two CPU devices."""
    if rehearse:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
        tf.config.experimental_connect_to_cluster(resolver)
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

    def convolve(x, width, kernel, stride=1):
        x = layers.Conv2D(width, kernel, stride, "same", use_bias=False, kernel_initializer="he_normal")(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)  # PyTorch's numbers

    def block(x, width, stride):
        y = convolve(layers.ReLU()(convolve(x, width, 3, stride)), width, 3)
        if stride > 1:
            x = convolve(x, width, 1, stride)
        return layers.ReLU()(x + y)

    inputs = layers.Input((size, size, 3), dtype="uint8")
    x = layers.ReLU()(convolve(layers.Rescaling(1 / 255)(inputs), 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, "same")(x)
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        x = block(block(x, width, stride), width, 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, dtype="float32")(x))


def make_loops(strategy, model, optimizer):
    """Return two functions: train for some steps, and the share of a batch that is right; each on every core.

    Not `model.fit`: with TPUStrategy it was seen to fail (keras 19448, colabtools 5124), and here, with several steps
    in a call, on two CPU devices too (Keras 3.15).
    """
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(batch):
        images, classes = batch
        with tf.GradientTape() as tape:
            loss = cross_entropy(classes, model(images, training=True))
            share = loss / strategy.num_replicas_in_sync  # the optimiser adds up the gradients of all cores
        gradients = tape.gradient(share, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(batches, steps):
        loss = tf.zeros(())
        for _ in tf.range(steps):
            loss = strategy.reduce("MEAN", strategy.run(step, args=(next(batches),)), axis=None)
        return loss

    def right(batch):
        images, classes = batch
        found = tf.argmax(model(images, training=False), axis=-1)
        return tf.reduce_mean(tf.cast(found == classes, tf.float32))

    @tf.function
    def evaluate(batch):
        return strategy.reduce("MEAN", strategy.run(right, args=(batch,)), axis=None)

    return train, evaluate


def main() -> None:
    """Train, save, and print one line of JSON after each epoch."""
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
        model, optimizer = resnet18(given.size, given.classes), LARS(rate)
        optimizer.build(model.trainable_variables)
    train, evaluate = make_loops(strategy, model, optimizer)

    checkpoints = mounted(os.environ.get("AIP_CHECKPOINT_DIR") or "runs/checkpoints")
    folder = Path(checkpoints) / f"{given.steps}x{given.epochs}"  # the hundred steps are a run of their own
    done = tf.Variable(0, dtype=tf.int64)  # epochs
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, done=done)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    if manager.restore_or_initialize():
        print(f"goes on after epoch {int(done)}", flush=True)

    batches = iter(strategy.experimental_distribute_dataset(read(given.train, batch_size, given.size, train=True)))
    each = max(1, min(20, given.steps // 2))  # steps in one call: the host speaks to the TPU once for them all
    row = {}
    for epoch in range(int(done) + 1, given.epochs + 1):
        calls = []
        for first in range(0, given.steps, each):
            loss = float(train(batches, tf.constant(min(each, given.steps - first))))  # read, so they are done
            calls.append((time.monotonic(), min(first + each, given.steps)))
        (began, before), (ended, after) = calls[0], calls[-1]  # without the first call, in which graphs are compiled
        speed = (after - before) * batch_size / (ended - began) if len(calls) > 1 else None
        row = {"epoch": epoch, "loss": round(loss, 4), "images_per_second": speed and round(speed, 1)}
        if given.valid:
            valid = strategy.experimental_distribute_dataset(read(given.valid, batch_size, given.size, train=False))
            right = [float(evaluate(batch)) for batch in valid]
            row["valid_accuracy"] = round(sum(right) / len(right), 4) if right else None
        print(json.dumps(row), flush=True)
        done.assign(epoch)
        manager.save()
    models = Path(mounted(os.environ.get("AIP_MODEL_DIR") or "runs/model"))
    models.mkdir(parents=True, exist_ok=True)
    model.save(models / "model.keras")


if __name__ == "__main__":
    main()
