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
    """Return whether "low" or "high" values of a measure are better; None if unknown.

    If a name has several known words, the last one decides: "accuracy_error" is an error, so low
    values are better.

    Args:
        name: the name of the measure, with words separated by underscores, such as "valid_loss".
    """
    # From the last word on, because the noun comes last.
    for word in reversed(name.lower().replace("_", " ").split()):
        if word in _LOW_IS_GOOD:
            return "low"
        if word in _HIGH_IS_GOOD:
            return "high"
    return None
