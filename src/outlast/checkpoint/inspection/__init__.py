"""Looking into stores, without torch and without the training: what ``outlast ckpt`` shows."""
