"""Which measures are better when they are low, judged by the words of their names."""

_LOW_IS_GOOD = {"loss", "error", "err", "nll", "bce", "mse", "mae", "rmse", "msle", "mape", "smape", "brier", "ece"}
_LOW_IS_GOOD |= {"perplexity", "wer", "cer", "eer", "fid", "lpips", "hausdorff"}
_HIGH_IS_GOOD = {"auroc", "auc", "auprc", "accuracy", "acc", "f1", "fbeta", "precision", "recall", "sensitivity", "ap"}
_HIGH_IS_GOOD |= {"specificity", "map", "dice", "iou", "miou", "jaccard", "kappa", "mcc", "r2", "pearson", "spearman"}
_HIGH_IS_GOOD |= {"top1", "top5", "bleu", "rouge", "psnr", "ssim", "ndcg", "mrr"}


def better(name: str) -> str | None:
    """Return "low" or "high", whichever is better for a measure such as valid_loss; None where its name tells neither.

    The last word decides where a name has words of both: accuracy_error is an error.
    """
    for word in reversed(name.lower().replace("_", " ").split()):
        if word in _LOW_IS_GOOD or word in _HIGH_IS_GOOD:
            return "low" if word in _LOW_IS_GOOD else "high"
    return None
