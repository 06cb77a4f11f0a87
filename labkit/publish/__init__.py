"""What leaves the workbench: notebooks in batch, reports, pages, tables, bundles with their claims."""
