"""Problems, tools and packaged policies: everything that can be trained without a network. One world is one folder."""
