"""What a training loop iterates: sources, the samples of each core, batches prepared ahead, augmentation."""
