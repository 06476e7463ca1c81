"""What the training loop is composed of: batches from the bank, the loss, publishing. Only `train.py` uses it."""
