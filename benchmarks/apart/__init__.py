"""Parts trained apart on synthetic labels, beside end-to-end training."""
