"""Parts that `seq2seq`, `spotlight` and `post` share: they learn a device for each group."""
