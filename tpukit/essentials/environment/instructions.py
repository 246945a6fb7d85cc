"""Fixes for errors and findings that depend on the platform: menu items and commands."""

from tpukit.essentials.environment.hardware import MachineInfo

_GET_A_TPU = {
    "Colab": "Runtime > Change runtime type > v5e-1 TPU, then run the first cell again",
    "Kaggle": "Settings > Accelerator > TPU v5e-8, then run the first cell again",
    "Vertex AI": "submit the job with a TPU machine type, such as ct5lp-hightpu-8t "
    "(eight v5e chips)",
}
_OPEN_ON_A_PLATFORM = (
    "open the notebook on Colab (Runtime > Change runtime type > v5e-1 TPU) "
    "or on Kaggle (Settings > Accelerator > TPU v5e-8)"
)
_RESTART = {
    "Colab": "Runtime > Restart session",
    "Kaggle": "Run > Restart & clear cell outputs",
}
_START_AFRESH = {
    "Colab": "Runtime > Disconnect and delete runtime, then run the first cell again",
    "Kaggle": "Run > Factory reset, then run the first cell again",
}


def how_to_get_a_tpu(host: MachineInfo) -> str:
    """Return the menu items or the command that give a TPU on this platform."""
    return _GET_A_TPU.get(host.platform, _OPEN_ON_A_PLATFORM)


def how_to_restart(host: MachineInfo) -> str:
    """Return the menu items that restart the kernel on this platform."""
    otherwise = "restart the kernel (Kernel > Restart) or start Python again"
    return _RESTART.get(host.platform, otherwise)


def how_to_start_afresh(host: MachineInfo) -> str:
    """Return the menu items that restore the platform's original image."""
    return _START_AFRESH.get(host.platform, "start again from a fresh environment")
