"""A moving average of a model's weights, which often evaluates better than the weights themselves."""


def moving_average(model, *, decay: float = 0.999):
    """Make torch's `AveragedModel` that follows a model's weights exponentially; its buffers are copied.

    Update it within the step, evaluate and save its `module`, a model of the same kind with the same state dict:

        averaged = moving_average(model)               # after core.model
        with core.step():
            ...
            core.optimizer_step(optimizer)
            averaged.update_parameters(model)
        evaluate(averaged.module.eval())               # the same graph as the model's: nothing compiles again

    On XLA an update is a part of the step's graph, with no copy to the host. To resume, keep `averaged.state_dict()`:
    it counts the updates, and the first one copies the weights.

    Args:
        model: on its device. The average lives there too and takes as much memory as the weights.
        decay: 0.999 averages about the last 1 / (1 - 0.999) = 1,000 updates; more than a tenth of the run is too many.

    Raises:
        ValueError: decay is not between 0 and 1.
    """
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    if not 0 < decay < 1:
        raise ValueError(f"decay is between 0 and 1, 0.99 for about the last 100 updates, got {decay}")
    # Without `device`: the copy is where the model is, and the count of updates, which Python compares with 0, stays on
    # the host. With device="xla" that comparison copies to the host twice an update, and cuts the step into 3 graphs.
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
