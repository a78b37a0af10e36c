"""What `gymtask.trainer.Trainer` is made of."""
