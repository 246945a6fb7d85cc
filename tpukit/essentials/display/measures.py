"""Whether low or high values of a measure are better, judged by the words of its name."""

_LOW_IS_GOOD = {
    *("loss", "error", "err", "nll", "bce", "mse", "mae", "rmse", "msle", "mape", "smape"),
    *("brier", "ece", "perplexity", "wer", "cer", "eer", "fid", "lpips", "hausdorff"),
}
_HIGH_IS_GOOD = {
    *("auroc", "auc", "auprc", "ap", "map", "accuracy", "acc", "top1", "top5", "f1", "fbeta"),
    *("precision", "recall", "sensitivity", "specificity", "kappa", "mcc", "ndcg", "mrr"),
    *("dice", "iou", "miou", "jaccard", "r2", "pearson", "spearman"),
    *("bleu", "rouge", "psnr", "ssim"),
}


def better(name: str) -> str | None:
    """Return "low" or "high", whichever is better for a measure such as valid_loss.

    If a name has words of both kinds, the last decides: accuracy_error is an error. It is
    None if no word of the name is known.
    """
    for word in reversed(name.lower().replace("_", " ").split()):
        if word in _LOW_IS_GOOD:
            return "low"
        if word in _HIGH_IS_GOOD:
            return "high"
    return None
