"""A saved model, used: opened, asked (predict, chat), measured (evaluate), with the preprocessing of its training."""
