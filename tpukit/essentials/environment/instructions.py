"""What to click or type on each platform: the fixes of errors and findings."""

from tpukit.essentials.environment.hardware import MachineInfo


def how_to_get_a_tpu(host: MachineInfo) -> str:
    """Return how to get a TPU on this platform."""
    return {
        "Colab": "Runtime > Change runtime type > v5e-1 TPU, then run the first cell again",
        "Kaggle": "Settings > Accelerator > TPU v5e-8, then run the first cell again",
        "Vertex AI": "submit the job with a TPU machine type, such as ct5lp-hightpu-8t (eight v5e chips)",
    }.get(
        host.platform,
        "open the notebook on Colab (Runtime > Change runtime type > v5e-1 TPU) "
        "or on Kaggle (Settings > Accelerator > TPU v5e-8)",
    )


def how_to_restart(host: MachineInfo) -> str:
    """Return how to restart the kernel on this platform."""
    return {
        "Colab": "Runtime > Restart session",
        "Kaggle": "Run > Restart & clear cell outputs",
    }.get(host.platform, "restart the kernel (Kernel > Restart) or start Python again")


def how_to_start_afresh(host: MachineInfo) -> str:
    """Return how to get the platform's original image back."""
    return {
        "Colab": "Runtime > Disconnect and delete runtime, then run the first cell again",
        "Kaggle": "Run > Factory reset, then run the first cell again",
    }.get(host.platform, "start again from a fresh environment")
