"""Old code by what a rule makes of it: cells before and after; what stops; what is left alone; what is noted."""

XM = "import torch_xla.core.xla_model as xm\n"
XMP = "import torch_xla.distributed.xla_multiprocessing as xmp\n"
PL = "import torch_xla.distributed.parallel_loader as pl\n"
XR = "import torch_xla.runtime as xr\n"
KIT = "import tpukit\n"
TX = "import torch_xla\n"


def one(before, after):
    return (before,), (after,)


CHANGES = {
    "world size and rank": one(
        f"{XM}def f():\n    return xm.xrt_world_size(), xm.get_ordinal(defval=0)  # kept\n",
        f"{XM}{XR}def f():\n    return xr.world_size(), xr.global_ordinal()  # kept\n",
    ),
    "imported by name": one(
        "from torch_xla.core.xla_model import get_ordinal, xla_device_hw, xrt_world_size as cores\n"
        "def f():\n    return get_ordinal() / cores()\n",
        f"from torch_xla.core.xla_model import xla_device_hw\n{XR}def f():\n    return xr.global_ordinal() / xr.world_size()\n",
    ),
    "the only name of an import": one(
        "# why\nfrom torch_xla.core.xla_model import get_ordinal  # one\ndef f():\n    return get_ordinal()\n",
        "# why\nimport torch_xla.runtime as xr  # one\ndef f():\n    return xr.global_ordinal()\n",
    ),
    "by the package's whole name": one(
        "import torch_xla.core.xla_model\ndef f():\n    return torch_xla.core.xla_model.get_ordinal()\n",
        f"import torch_xla.core.xla_model\n{XR}def f():\n    return xr.global_ordinal()\n",
    ),
    "another alias": one(
        "from torch_xla.core import xla_model as model\ndef f():\n    return model.get_ordinal()\n",
        f"from torch_xla.core import xla_model as model\n{XR}def f():\n    return xr.global_ordinal()\n",
    ),
    "a reference without a call": one(
        f"{XM}def f(xs):\n    return xs(xm.get_ordinal)\n", f"{XM}{XR}def f(xs):\n    return xs(xr.global_ordinal)\n"
    ),
    "xr is taken": one(
        f"import xarray as xr\n{XM}def f():\n    return xm.get_ordinal(), xr.open('x')\n",
        f"import xarray as xr\n{XM}import torch_xla.runtime as xla_runtime\n"
        "def f():\n    return xla_runtime.global_ordinal(), xr.open('x')\n",
    ),
    "xr is there already": one(
        f"{XM}from torch_xla import runtime\ndef f():\n    return xm.get_ordinal()\n",
        f"{XM}from torch_xla import runtime\ndef f():\n    return runtime.global_ordinal()\n",
    ),
    "inside an f-string": one(
        f"{XM}def f():\n    print(f'{{xm.get_ordinal()}} of {{xm.xrt_world_size():02d}}')\n",
        f"{XM}{XR}def f():\n    print(f'{{xr.global_ordinal()}} of {{xr.world_size():02d}}')\n",
    ),
    "an import in a block": one(
        f"if USE_TPU:\n    {XM}    print('tpu')\ndef f():\n    return xm.get_ordinal()\n",
        f"if USE_TPU:\n    {XM}    {XR}    print('tpu')\ndef f():\n    return xr.global_ordinal()\n",
    ),
    "an import in a function, with tabs": one(
        f"def f():\n\t{XM}\treturn xm.get_ordinal()\ndef g():\n    return 1\n",
        f"def f():\n\t{XM}\t{XR}\treturn xr.global_ordinal()\ndef g():\n    return 1\n",
    ),
    "over cells, and nobody imports it": (
        ("%%time\n'what it does'\nfrom __future__ import division\ndef f():\n    return xm.get_ordinal()\n",),
        (f"%%time\n'what it does'\nfrom __future__ import division\n{XR}def f():\n    return xr.global_ordinal()\n",),
    ),
    "the import stands in another cell": (
        (XM, "def f():\n    return xm.get_ordinal()\n"),
        (XM + XR, "def f():\n    return xr.global_ordinal()\n"),
    ),
    "an alias by assignment": one(
        f"{TX}model = torch_xla.core.xla_model\ndef f():\n    return model.get_ordinal()\n",
        f"{TX}model = torch_xla.core.xla_model\n{XR}def f():\n    return xr.global_ordinal()\n",
    ),
    "a star": one(
        "from torch_xla.core.xla_model import *\ndef f():\n    return get_ordinal()\n",
        f"from torch_xla.core.xla_model import *\n{XR}def f():\n    return xr.global_ordinal()\n",
    ),
    "the package's first name": one(
        "import torch_xla_py.xla_model as xm\ndef f():\n    return xm.xla_device()\n",
        f"{XM}{TX}def f():\n    return torch_xla.device()\n",
    ),
    "a launch and a loader of a star": one(
        "from torch_xla.distributed.parallel_loader import *\nfrom torch_xla.distributed.xla_multiprocessing import *\n"
        "def f(r):\n    g(ParallelLoader(l, [d]).per_device_loader(d))\nspawn(f, nprocs=8)\n",
        "from torch_xla.distributed.parallel_loader import *\nfrom torch_xla.distributed.parallel_loader import MpDeviceLoader\n"
        f"from torch_xla.distributed.xla_multiprocessing import *\n{KIT}"
        'def f(r):\n    g(MpDeviceLoader(l, d))\ntpukit.launch(tpukit.on_old_rank(f), backend="xla")\n',
    ),
    "a module that has moved": one(
        "from torch_xla.experimental import pjrt\ndef f():\n    return pjrt.world_size(), pjrt.using_pjrt()\n",
        "from torch_xla import runtime as pjrt\ndef f():\n    return pjrt.world_size(), True\n",
    ),
    "the device": one(
        f"{TX}{XM}def f():\n    xm.mark_step()\n    return xm.xla_device(devkind='TPU'), xm.xla_device(None)\n",
        f"{TX}{XM}def f():\n    torch_xla.sync()\n    return torch_xla.device(), torch_xla.device()\n",
    ),
    "a loader in two steps": one(
        f"{PL}def f(l, d):\n    p = pl.ParallelLoader(l, [d], loader_prefetch_size=2)\n    g(p.per_device_loader(d))\n"
        "    print(len(p))\n    del p\ndef h(p):\n    return p.other\n",
        f"{PL}def f(l, d):\n    p = pl.MpDeviceLoader(l, d, loader_prefetch_size=2)\n    g(p)\n"
        "    print(len(p))\n    del p\ndef h(p):\n    return p.other\n",
    ),
    "a loader that is gone through itself, which it never could be": one(
        f"{PL}def f(l, d):\n    p = pl.ParallelLoader(l, [d])\n    for b in p:\n        g(b)\n"
        "def h(l, d):\n    p = pl.ParallelLoader(l, [d])\n    for i, b in enumerate(p):\n        g(b)\n",
        f"{PL}def f(l, d):\n    p = pl.MpDeviceLoader(l, d)\n    for b in p:\n        g(b)\n"
        "def h(l, d):\n    p = pl.MpDeviceLoader(l, d)\n    for i, b in enumerate(p):\n        g(b)\n",
    ),
    "a loader in one step, by keyword": one(
        f"{PL}def f(x, d):\n    return pl.ParallelLoader(loader=x, devices=[d], drop_last=True).per_device_loader(d)\n",
        f"{PL}def f(x, d):\n    return pl.MpDeviceLoader(loader=x, device=d)\n",
    ),
    "a loader by the name of a bar": one(
        f"{PL}def f(l, d, tpu):\n    bar = pl.ParallelLoader(l, [d]).per_device_loader(d) if tpu else tqdm(l)\n"
        "    if tpu:\n        bar = pl.ParallelLoader(l, [d]).per_device_loader(d)\n    bar.set_postfix(loss=1)\n    bar.close()\n",
        f"{PL}def f(l, d, tpu):\n    bar = pl.MpDeviceLoader(l, d) if tpu else tqdm(l)\n"
        "    if tpu:\n        bar = pl.MpDeviceLoader(l, d)\n    bar.set_postfix(loss=1)\n    bar.close()\n",
    ),
    "a loader that a class keeps": one(
        f"{PL}class A:\n    def f(self):\n        self.p = pl.ParallelLoader(self.l, [self.d])\n"
        "    def g(self):\n        return self.p.per_device_loader(self.d)\n",
        f"{PL}class A:\n    def f(self):\n        self.p = pl.MpDeviceLoader(self.l, self.d)\n"
        "    def g(self):\n        return self.p\n",
    ),
    "a loader imported by name": one(
        "from torch_xla.distributed.parallel_loader import ParallelLoader\n"
        "def f(l, d):\n    return ParallelLoader(l, [d]).per_device_loader(d)\n",
        "from torch_xla.distributed.parallel_loader import ParallelLoader\n"
        "from torch_xla.distributed.parallel_loader import MpDeviceLoader\n"
        "def f(l, d):\n    return MpDeviceLoader(l, d)\n",
    ),
    "a length that was patched in": one(
        f"{PL}a = 1\npl.PerDeviceLoader.__len__ = length\nb = 2\n",
        f"{PL}a = 1\n# tpukit: not needed: pl.PerDeviceLoader.__len__ = length\nb = 2\n",
    ),
    "a launch": one(
        f"{XMP}xmp.spawn(f, args=(FLAGS,), nprocs=8, start_method='fork')\n",
        f'{XMP}{KIT}tpukit.launch(tpukit.on_old_rank(f), FLAGS, backend="xla")\n',
    ),
    "a launch over lines, with comments": one(
        f"{XMP}xmp.spawn(\n    f,  # the worker\n    args=(1, *more),\n    nprocs=8,  # cores\n    start_method='fork'\n)\n",
        f"{XMP}{KIT}tpukit.launch(\n    tpukit.on_old_rank(f),  # the worker\n    1, *more,\n    # cores\n    "
        'backend="xla"\n)\n',
    ),
    "a launch on one core, of what stands elsewhere": one(
        f"{XMP}r = xmp.spawn(f, flags, 1, join=True, daemon=False)\n",
        f'{XMP}{KIT}r = tpukit.launch(tpukit.on_old_rank(f), *flags, cores=1, backend="xla")\n',
    ),
    "a launch in the line that imports": one(
        "# why\nimport torch_xla.distributed.xla_multiprocessing as xmp; xmp.spawn(f, nprocs=8)\n",
        f"# why\n{KIT}import torch_xla.distributed.xla_multiprocessing as xmp; "
        'tpukit.launch(tpukit.on_old_rank(f), backend="xla")\n',
    ),
    "the only name of an import, and what needs it in its line": one(
        "from torch_xla.core.xla_model import get_ordinal; f = lambda: get_ordinal()\n",
        f"{XR}f = lambda: xr.global_ordinal()\n",
    ),
    "an import behind a colon": one(
        f"if tpu: {XM}def f():\n    return xm.get_ordinal()\n",
        "if tpu: import torch_xla.runtime as xr; import torch_xla.core.xla_model as xm\n"
        "def f():\n    return xr.global_ordinal()\n",
    ),
    "the only name of an import behind a colon": one(
        "if tpu: from torch_xla.core.xla_model import get_ordinal\ndef f():\n    return get_ordinal()\n",
        "if tpu: import torch_xla.runtime as xr\ndef f():\n    return xr.global_ordinal()\n",
    ),
    "a launch that is timed": one(
        f"{XMP}%time xmp.spawn(f, args=(), nprocs=8)\n",
        f'{XMP}{KIT}%time tpukit.launch(tpukit.on_old_rank(f), backend="xla")\n',
    ),
    "a launch in a string of nbconvert": one(
        f"{XMP}get_ipython().run_cell_magic('time', '', 'xmp.spawn(f, nprocs=8)\\n')\n",
        f"{XMP}{KIT}get_ipython().run_cell_magic('time', '', "
        "'tpukit.launch(tpukit.on_old_rank(f), backend=\"xla\")\\n')\n",
    ),
    "replicas that are the launch's": one(
        f"{XMP}def f(rank):\n    s = DistributedSampler(d, num_replicas=8, rank=rank)\nxmp.spawn(f, nprocs=8)\n",
        f"{XMP}{XR}{KIT}def f(rank):\n    s = DistributedSampler(d, num_replicas=xr.world_size(), rank=rank)\n"
        'tpukit.launch(tpukit.on_old_rank(f), backend="xla")\n',
    ),
    "replicas by their place": one(
        f"{XMP}def f(rank):\n    s = DistributedSampler(d, 8, rank)\nxmp.spawn(f, nprocs=8)\n",
        f"{XMP}{XR}{KIT}def f(rank):\n    s = DistributedSampler(d, xr.world_size(), rank)\n"
        'tpukit.launch(tpukit.on_old_rank(f), backend="xla")\n',
    ),
    "replicas, and the rank, where each has an import of its own": (
        (
            XM + XMP,
            "def f(r):\n    s = DistributedSampler(d, num_replicas=8, rank=r)\n    print(xm.get_ordinal())\n",
            "xmp.spawn(f, nprocs=8)\n",
        ),
        (
            XM + XR + XMP + KIT,
            "def f(r):\n    s = DistributedSampler(d, num_replicas=xr.world_size(), rank=r)\n    print(xr.global_ordinal())\n",
            'tpukit.launch(tpukit.on_old_rank(f), backend="xla")\n',
        ),
    ),
    "a print in the kernel": one(
        f"{XM}{XMP}xm.master_print('begin')\nxmp.spawn(f, nprocs=1)\n",
        f"{XM}{XMP}{KIT}print('begin')\ntpukit.launch(tpukit.on_old_rank(f), cores=1, backend=\"xla\")\n",
    ),
    "AdamW": one(
        "from transformers import (\n    AdamW, get_schedule,\n)\no = AdamW(p, lr=1e-3, correct_bias=True)\n",
        "from transformers import (\n    get_schedule,\n)\nfrom torch.optim import AdamW\n"
        "o = AdamW(p, lr=1e-3, eps=1e-6, weight_decay=0.0)\n",
    ),
    "AdamW with its own, under another name": one(
        "from transformers.optimization import AdamW as A\no = A(p, 1e-3, (0.9, 0.99), 1e-8, weight_decay=0.1)\n",
        "from torch.optim import AdamW as A\no = A(p, 1e-3, (0.9, 0.99), 1e-8, weight_decay=0.1)\n",
    ),
    "AdamW of the module": one(
        "import torch\nimport transformers\no = transformers.AdamW(p)\n",
        "import torch\nimport transformers\no = torch.optim.AdamW(p, eps=1e-6, weight_decay=0.0)\n",
    ),
    "a scheduler that prints": one(
        "from torch.optim import lr_scheduler\ns = lr_scheduler.StepLR(o, 1, verbose=True)\nt = Own(verbose=True)\n",
        "from torch.optim import lr_scheduler\ns = lr_scheduler.StepLR(o, 1)\nt = Own(verbose=True)\n",
    ),
    "numpy": one(
        "import numpy as np\nx = a.astype(np.int), np.float32\n", "import numpy as np\nx = a.astype(int), np.float32\n"
    ),
    "Lightning": one(
        "import pytorch_lightning as pl\nt = pl.Trainer(tpu_cores=8, max_epochs=1)\n",
        'import pytorch_lightning as pl\nt = pl.Trainer(accelerator="tpu", devices=8, max_epochs=1)\n',
    ),
    "devices": one(
        f"{XM}def f():\n    return xm.get_xla_supported_devices(devkind='TPU', max_devices=1)\n",
        f"{XM}def f():\n    return xm.get_xla_supported_devices(max_devices=1)\n",
    ),
    "lines for the shell": one(
        "!curl https://x/env-setup.py -o pytorch-xla-env-setup.py\nif new:\n    !python pytorch-xla-env-setup.py\nx = 1\n",
        "# tpukit: not needed: !curl https://x/env-setup.py -o pytorch-xla-env-setup.py\nif new:\n"
        "    pass  # tpukit: not needed: !python pytorch-xla-env-setup.py\nx = 1\n",
    ),
    "pip, over lines": one(
        "!pip install -q transformers \\\n  cloud-tpu-client==0.10 torch==1.9.0 \\\n  "
        "https://storage.googleapis.com/tpu-pytorch/wheels/torch_xla-1.9-cp37.whl\nx = 1\n",
        "!pip install -q transformers\nx = 1\n",
    ),
    "pip with nothing left, and a link to look in": one(
        "%pip install torch_xla[tpu]~=2.0 -f https://storage.googleapis.com/libtpu-releases/index.html\nx = 1\n",
        "# tpukit: not needed: %pip install torch_xla[tpu]~=2.0 -f "
        "https://storage.googleapis.com/libtpu-releases/index.html\nx = 1\n",
    ),
    "commands in one line": one(
        "!curl x/env-setup.py -o a && python env-setup.py && pip install 'timm;x'\n", "!pip install 'timm;x'\n"
    ),
    "a version that only the set-up reads": one(
        'VERSION = "nightly"  #@param\n!curl x/env-setup.py -o a\n!python env-setup.py --version $VERSION\nx = 1\n',
        '# tpukit: not needed: VERSION = "nightly"\n# tpukit: not needed: !curl x/env-setup.py -o a\n'
        "# tpukit: not needed: !python env-setup.py --version $VERSION\nx = 1\n",
    ),
    "a version that the shell says": one(
        "VERSION = !curl -s x/latest\nVERSION = VERSION[0]\n!pip install cloud-tpu-client torch_xla-{VERSION}-cp37.whl\nx = 1\n",
        "# tpukit: not needed: VERSION = !curl -s x/latest\n# tpukit: not needed: VERSION = VERSION[0]\n"
        "# tpukit: not needed: !pip install cloud-tpu-client torch_xla-{VERSION}-cp37.whl\nx = 1\n",
    ),
    "what a line for the shell says": one(
        "VERSION = !curl x/env-setup.py\nprint(VERSION)\n",
        "VERSION = None  # tpukit: not needed: VERSION = !curl x/env-setup.py\nprint(VERSION)\n",
    ),
    "a cell of the shell": one(
        "%%bash\nif true; then\n    curl x/env-setup.py -o a\nfi\npip install timm \\\n  cloud-tpu-client\necho done\n",
        "%%bash\nif true; then\n    :  # tpukit: not needed: curl x/env-setup.py -o a\nfi\npip install timm\necho done\n",
    ),
    "a shell line of nbconvert": one(
        "get_ipython().system('curl x/env-setup.py -o a')\nget_ipython().system('pip install timm cloud-tpu-client')\n",
        "# tpukit: not needed: curl x/env-setup.py -o a\nget_ipython().system('pip install timm')\n",
    ),
    "wheels of one's own": one(
        "STORE = 'gs://tpu-pytorch/wheels'\nWHEEL = 'torch-{}-cp36-cp36m-linux_x86_64.whl'.format(v)\n"
        '!pip uninstall -y torch torchvision\n!gsutil cp "$STORE/$WHEEL" .\n!pip install "$WHEEL" timm\n'
        "!pip uninstall -y torch-lucent typing\nx = 1\n",
        "# tpukit: not needed: STORE = 'gs://tpu-pytorch/wheels'\n"
        "# tpukit: not needed: WHEEL = 'torch-{}-cp36-cp36m-linux_x86_64.whl'.format(v)\n"
        "# tpukit: not needed: !pip uninstall -y torch torchvision\n"
        '# tpukit: not needed: !gsutil cp "$STORE/$WHEEL" .\n!pip install timm\n'
        "!pip uninstall -y torch-lucent typing\nx = 1\n",
    ),
    "a shell line of Python's": one(
        "import os\ndef f():\n    os.system('curl x/env-setup.py -o a')\n    os.system('pip install timm cloud-tpu-client')\n",
        "import os\ndef f():\n    # tpukit: not needed: curl x/env-setup.py -o a\n    os.system('pip install timm')\n",
    ),
    "dead variables": one(
        "import os\nos.environ['XRT_TPU_CONFIG'] = 'x'\nassert os.environ['COLAB_TPU_ADDR'], 'no TPU'\ndef f():\n"
        "    os.environ['XLA_TENSOR_ALLOCATOR_MAXSIZE'] = '1'\n    return 1\n",
        "import os\n# tpukit: not needed: os.environ['XRT_TPU_CONFIG'] = 'x'\n"
        "# tpukit: not needed: assert os.environ['COLAB_TPU_ADDR'], 'no TPU'\ndef f():\n"
        "    # tpukit: not needed: os.environ['XLA_TENSOR_ALLOCATOR_MAXSIZE'] = '1'\n    return 1\n",
    ),
    "an address that is read later": one(
        "import os\naddress = 'grpc://' + os.environ['COLAB_TPU_ADDR']\nprint(address)\n",
        "import os\naddress = None  # tpukit: not needed: address = 'grpc://' + os.environ['COLAB_TPU_ADDR']\nprint(address)\n",
    ),
    "the default type, alone in its function": one(
        "import torch\ndef f(rank):\n    torch.set_default_tensor_type('torch.FloatTensor')\n",
        "import torch\ndef f(rank):\n    pass  # tpukit: not needed: torch.set_default_tensor_type('torch.FloatTensor')\n",
    ),
    "a file that a cell writes": one(
        f"%%writefile train.py\n{XM}def f():\n    return xm.get_ordinal()\n",
        f"%%writefile train.py\n{XM}{XR}def f():\n    return xr.global_ordinal()\n",
    ),
}

STOPS = {
    "an invented name": ((f"{XM}x = 1\nxm.is_master_proc()\n",), (1, 3), "xm.is_master_ordinal()"),
    "a name that was there": ((f"{XM}def f():\n    xm.parse_xla_device('a')\n",), (1, 3), "device.type"),
    "the nearest name": ((f"{XM}def f():\n    xm.optimizer_stepp(o)\n",), (1, 3), "optimizer_step"),
    "a module": (("import torch_xla.utils.gcsfs as gcs\n",), (1, 1), "fsspec"),
    "a name of an import": (("from torch_xla.core.xla_model import is_master_proc\n",), (1, 1), "is_master_ordinal"),
    "a module of another module": (("import torch_xla\nn = torch_xla.tpu.device_count()\n",), (1, 2), "world_size"),
    "a device by number": ((f"{XM}def f(fold):\n    return xm.xla_device(fold + 1)\n",), (1, 3), "launch_each"),
    "a device of today by number": ((f"{TX}def f():\n    return torch_xla.device(1)\n",), (1, 3), "launch_each"),
    "world size in the kernel": (
        (f"{XM}{XMP}", "n = xm.xrt_world_size()\n", "xmp.spawn(f, nprocs=8)\n"),
        (2, 1),
        "worker",
    ),
    "in a function that the kernel calls": (
        (
            f"{XM}{XMP}def main():\n    d = xm.xla_device()\n    xmp.spawn(f, nprocs=8)\nif __name__ == '__main__':\n    main()\n",
        ),
        (1, 4),
        "worker",
    ),
    "a class that the kernel makes": (
        (
            f"{XM}{XMP}class A:\n    def __init__(self):\n        self.d = xm.xla_device()\na = A()\nxmp.spawn(f, nprocs=8)\n",
        ),
        (1, 5),
        "worker",
    ),
    "a method that a method calls": (
        (
            f"{XM}{XMP}class A:\n    def fit(self):\n        self.valid()\n    def valid(self):\n        xm.rendezvous('a')\n"
            "a = A()\na.fit()\nxmp.spawn(f, nprocs=8)\n",
        ),
        (1, 7),
        "worker",
    ),
    "in a loop of launches": (
        (f"{XM}{XMP}for _ in r:\n    xmp.spawn(f, nprocs=8)\n    xm.save(a, b)\n",),
        (1, 5),
        "worker",
    ),
    "a default value of a function": (
        (f"{XM}{XMP}def f(rank, device=xm.xla_device()):\n    pass\nxmp.spawn(f, nprocs=8)\n",),
        (1, 3),
        "worker",
    ),
    "a decorator's argument": (
        (f"{XM}{XMP}@of(xm.xrt_world_size())\ndef f(rank):\n    pass\nxmp.spawn(f, nprocs=8)\n",),
        (1, 3),
        "worker",
    ),
    "a launch of today": ((f"{TX}{KIT}d = torch_xla.device()\ntpukit.launch(f)\n",), (1, 3), "worker"),
    "a launch that does not wait": ((f"{XMP}xmp.spawn(f, nprocs=8, join=False)\n",), (1, 2), "join=False"),
    "a launch that is handed on": (
        (f"{XMP}go = functools.partial(xmp.spawn, nprocs=8)\ngo(f)\n",),
        (1, 2),
        "tpukit.launch",
    ),
    "DataParallel": (
        ("import torch_xla.distributed.data_parallel as dp\nm = dp.DataParallel(net)\n",),
        (1, 2),
        "worker function",
    ),
    "devices to spread over": (
        (f"{XM}def f():\n    return [g(d) for d in xm.get_xla_supported_devices()]\n",),
        (1, 3),
        "one device",
    ),
    "several devices": ((f"{PL}def f(l, a, b):\n    return pl.ParallelLoader(l, [a, b])\n",), (1, 3), "one"),
    "correct_bias": (("from transformers import AdamW\no = AdamW(p, correct_bias=False)\n",), (1, 2), "correct_bias"),
    "no Python": ((XM, "x = 1\nprint 'a'\n"), (2, 2), "Missing parentheses"),
    "a head that reads the address": (("import os\nif os.environ['COLAB_TPU_ADDR']:\n    x = 1\n",), (1, 2), "chips"),
    "getattr": ((f"{XM}f = getattr(xm, 'is_master_proc')\n",), (1, 2), "is_master_ordinal"),
    "a name of another module": ((f"{XMP}def f(l, d):\n    xmp.MpDeviceLoader(l, d)\n",), (1, 3), "parallel_loader.Mp"),
    "an invented name of another module": (("import torch_xla\ntorch_xla.load('x')\n",), (1, 2), "torch.load"),
    "a name like a private one": (("import torch_xla\ntorch_xla.set_default_env()\n",), (1, 2), "what is in torch_xla"),
    "TorchTPU's device of a model": ((f"{XM}def f(net):\n    net.to('tpu')\n",), (1, 3), "xla"),
    "TorchTPU's device of a tensor": ((f"{XM}import torch\nx = torch.zeros(2, device='tpu:0')\n",), (1, 3), "xla"),
    "TorchTPU's device": (("import torch\nimport torch_xla\nd = torch.device('tpu')\n",), (1, 3), "xla"),
}

LEFT_ALONE = {
    "a comment and a string": (f"{XM}# xm.xrt_world_size()\ns = 'xm.get_ordinal()'\n",),
    "a parameter xm": ("def f(xm):\n    return xm.get_ordinal()\n",),
    "a variable xm of one's own": ("xm = Thing()\nxm.get_ordinal()\n",),
    "a method of that name": (f"{XM}x.get_ordinal()\nself.xrt_world_size()\n",),
    "pl of Lightning": ("import pytorch_lightning as pl\npl.ParallelLoader(a, [b])\n",),
    "pl of Lightning in one cell": (PL, "import pytorch_lightning as pl\nx = pl.ParallelLoader(a, [b])\n"),
    "what still works": (
        f"{XM}{XMP}def f(rank):\n    xm.optimizer_step(o, barrier=True)\n    xm.master_print('a')\n    xm.rendezvous('b')\n"
        "    xm.save(m, 'c')\n    xm.RateTracker()\nw = xmp.MpModelWrapper(net)\ne = xmp.MpSerialExecutor()\n",
    ),
    "a loader whose making is not seen": (f"{PL}def f(loader, d):\n    return loader.per_device_loader(d)\n",),
    "a loader with another use": (
        f"{PL}def f(l, d):\n    p = pl.ParallelLoader(l, [d])\n    g(p)\n    return p.per_device_loader(d)\n",
    ),
    "a loader that is asked for its next batch": (
        f"{PL}def f(l, d):\n    p = pl.ParallelLoader(l, [d])\n    it = p.per_device_loader(d)\n    return next(it)\n"
        "def g(l, d):\n    return pl.ParallelLoader(l, [d]).per_device_loader(d).next()\n",
    ),
    "another default type": ("import torch\ntorch.set_default_tensor_type('torch.cuda.FloatTensor')\n",),
    "magics, and a % that is none": (
        "%matplotlib inline\nx = '''\n!pip install cloud-tpu-client\n%d''' % (\n1\n% 2)\n?x\ny = !ls\n",
    ),
    "a cell of another language": ("%%html\n<b>xm.get_ordinal()</b>\n",),
    "a look before": (f"{XM}if hasattr(xm, 'is_master_proc'):\n    xm.is_master_proc()\n",),
    "an import that may fail": (
        "try:\n    from torch_xla.core.xla_model import is_master_proc\nexcept ImportError:\n    pass\n",
    ),
    "an import that may fail in any way": (
        "try:\n    from torch_xla.core.xla_model import is_master_proc\nexcept Exception:\n    pass\n"
        "try:\n    import torch_xla.utils.gcsfs as gcs\nexcept:\n    gcs = None\n",
    ),
    "tpu as a word": (f"{XM}def f(net):\n    net.to(name='tpu')\n    train(device='tpu')\n",),
    "a name that may be missing": (
        f"{XM}try:\n    xm.is_master_proc()\nexcept (ImportError, AttributeError):\n    pass\n",
    ),
    "a test of the version": (f"{TX}{XM}if torch_xla.__version__ < '2':\n    n = xm.xrt_world_size()\n",),
    "AdamW of torch": ("from torch.optim import AdamW\no = AdamW(p)\n",),
    "a pip line of one's own": ("!pip install transformers==4.1 'torch>=1.0'\n",),
}

NOTES = {
    "mesh_reduce": ((f"{XM}def f(a):\n    return xm.mesh_reduce('auc', a, max)\n",), "mesh_reduce"),
    "bfloat16": (("import os\nos.environ['XLA_USE_BF16'] = '1'\n",), "XLA_USE_BF16"),
    "a look for the address": (("import os\nuse_tpu = 'COLAB_TPU_ADDR' in os.environ\n",), "address"),
    "the address, if there is one": (("import os\nif os.environ.get('COLAB_TPU_ADDR'):\n    x = 1\n",), "address"),
    "export": (("!export XLA_USE_BF16=1\n",), "export"),
    "after the launch": ((f"{XM}{XMP}xmp.spawn(f, nprocs=8)\nxm.save(a, b)\n",), "kernel"),
    "one core": ((f"{XMP}xmp.spawn(f, nprocs=1)\n",), "one core"),
    "Lightning 2": (("import pytorch_lightning as pl\nt = pl.Trainer(tpu_cores=8, gpus=0)\n",), "Trainer"),
    "in another branch than the launch": (
        (f"{XM}{XMP}if tpu:\n    xmp.spawn(f, nprocs=8)\nelse:\n    xm.master_print('a')\n",),
        "kernel",
    ),
    "no launch": ((f"{XM}d = xm.xla_device()\n",), "kernel"),
    "replicas as a number": (("def f(r):\n    return DistributedSampler(d, num_replicas=8, rank=r)\n",), "replicas"),
    "replicas as a number, by their place": (("def f(r):\n    return DistributedSampler(d, 8, r)\n",), "replicas"),
    "rate": ((f"{XM}def f():\n    lr = 0.1 * xm.xrt_world_size()\n",), "rate"),
    "a scheduler's arguments": (("scheduler_params = dict(\n    verbose=False, patience=2)\n",), "scheduler"),
    "validation": (("def f(r):\n    return DistributedSampler(valid_set, rank=r)\n",), "validation"),
    "a bar": (("from tqdm.notebook import tqdm\n",), "tqdm"),
    "pooled": (("class A:\n    def f(self, x):\n        _, pooled = self.bert(x)\n",), "pooled"),
    "padding": (("x = tok.encode_plus(t, pad_to_max_length=True)\n",), "padding"),
    "pretrained": (("import torchvision\nm = torchvision.models.resnet18(pretrained=True)\n",), "pretrained"),
    "a launch in a comment": (("# xmp.spawn(f, nprocs=8)\n",), "comment"),
    "a module of the notebook's": (("from engine import train_fn\n",), "modules"),
    "if better": ((f"{XM}def f(a, b):\n    if a > b:\n        xm.save(m, 'x')\n",), "save"),
    "devices": ((f"{XM}def f():\n    return len(xm.get_xla_supported_devices('TPU'))\n",), "runtime"),
    "a look before": ((f"{XM}if hasattr(xm, 'is_master_proc'):\n    xm.is_master_proc()\n",), "guarded"),
}
