"""The parts of examples/train_images.py: its pictures, training, checkpoints and samples."""
