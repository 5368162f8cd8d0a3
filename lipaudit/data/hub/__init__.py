"""The Hugging Face Hub: the commit that is read, the files of it, and why it cannot be had."""
