from forerun.cli import main

main()
