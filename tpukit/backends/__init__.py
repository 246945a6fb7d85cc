"""The only files that know torch_xla, NCCL or gloo. A new backend is a new file, and its runtime in this registry."""

from tpukit.backends.cpu import CpuRuntime
from tpukit.backends.cuda import CudaRuntime
from tpukit.backends.protocol import Runtime
from tpukit.backends.xla import XlaRuntime

# By name, the best first: a launch takes the first that the machine has devices for.
RUNTIMES: dict[str, Runtime] = {runtime.name: runtime for runtime in (XlaRuntime(), CudaRuntime(), CpuRuntime())}
