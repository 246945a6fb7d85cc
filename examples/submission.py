"""Answer exams with the two networks of notebook 04b, without internet: DICOM files in, submission.csv out.

    python submission.py --table test.csv --images test --networks folder

`make kaggle-bundle` puts this file beside the kit's wheels and the networks; Kaggle scores its notebook offline.
"""

import argparse
import json
import tempfile
from pathlib import Path


def main() -> None:
    """Read the arguments, answer, write and check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, required=True, help="test.csv: the identifiers of every image")
    parser.add_argument("--images", type=Path, required=True, help="the folder of their DICOM files")
    parser.add_argument("--networks", type=Path, required=True, help="slices.pt, exams.pt and settings.json")
    parser.add_argument("--to", type=Path, default=Path("submission.csv"))
    parser.add_argument("--batch-size", type=int, default=64, help="slices a core and step")
    parser.add_argument("--cores", type=int, help="None for all there are, or 1")
    options = parser.parse_args()

    import pandas
    import torch

    import tpukit
    from tpukit import pe

    tpukit.prepare()
    settings = json.loads((options.networks / "settings.json").read_text())
    prepared = pe.Preparation.read(settings["images"])
    images = pe.index_dicom(pandas.read_csv(options.table, dtype=str), options.images)

    resnet = pe.resnet34(options.networks / "slices.pt")
    network = pe.ExamNetwork(settings["features"])
    network.load_state_dict(torch.load(options.networks / "exams.pt", map_location="cpu", weights_only=True))
    # A pack joins labels; nobody knows these yet, and nothing reads them.
    unknown = images.assign(**dict.fromkeys(pe.LABELS, 0))
    with tempfile.TemporaryDirectory() as work:
        records = prepared.pack(options.images, Path(work) / "records", unknown)
        slices = tpukit.Records(records.folder, size=prepared.image_size, exact=True)
        prepared.check(slices)
        seen = tpukit.launch(see, resnet, slices, options.batch_size, cores=options.cores).results[0]
        table = images.iloc[slices.rows].reset_index(drop=True)
    features = torch.cat([seen["features"], seen["logits"]], dim=1)
    # Every exam has to be answered, also one that a scanner left irregular: that is printed, and goes on.
    exams = pe.ExamSequences(table, features, settings["exam_slices"], irregular="keep")
    outputs = tpukit.launch(read, network, exams, cores=options.cores).results[0]

    path = pe.write_submission(pe.make_consistent(exams.table(outputs)), options.to)
    checked = pe.read_submission(path, images)
    print(
        json.dumps({"studies": len(exams), "images": len(checked), "inconsistent": len(pe.check_consistency(checked))})
    )


def see(core, resnet, slices, batch_size: int):
    """Return what the first network says of every slice, and its features."""
    import tpukit
    from tpukit import pe

    batches = core.batches(slices, batch_size=batch_size)
    return tpukit.predict(core, pe.SliceFeatures(core.model(resnet)), batches, prepare=pe.normalize)


def read(core, network, exams):
    """Return what the second network says of every exam."""
    import tpukit

    return tpukit.predict(core, core.model(network), core.batches(exams, batch_size=min(32, len(exams))))


if __name__ == "__main__":
    main()
