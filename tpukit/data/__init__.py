"""What a training loop iterates: sources, who sees which sample, batches prepared ahead, augmentation."""
