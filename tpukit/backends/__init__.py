"""The only files that know torch_xla, NCCL or gloo. A new backend is a new file, and its runtime in this registry."""

from tpukit.backends.cpu import CpuRuntime
from tpukit.backends.cuda import CudaRuntime
from tpukit.backends.protocol import Runtime
from tpukit.backends.standin.recording import RecordingRuntime
from tpukit.backends.standin.runtime import StandInRuntime
from tpukit.backends.xla import XlaRuntime
from tpukit.backends.xla_cpu import XlaCpuRuntime

# By name, the best first: a launch takes the first that the machine has devices for.
_ALL = (XlaRuntime(), CudaRuntime(), CpuRuntime(), StandInRuntime(), XlaCpuRuntime(), RecordingRuntime())
RUNTIMES: dict[str, Runtime] = {runtime.name: runtime for runtime in _ALL}
