"""Rows of files as prompts: readers, filters, chat templates, and token ids that are kept on disk."""
