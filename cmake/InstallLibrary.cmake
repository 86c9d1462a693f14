# The C++ library: `cmake --install BUILD --component cpp` puts headers, archives and a CMake package where
# find_package(knapformer COMPONENTS core torch) finds them. Where Python's modules are built, a plain `cmake --install`
# installs these modules alone.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/knapformer)
set(_component COMPONENT cpp)
if(KNAPFORMER_PYTHON)
  list(APPEND _component EXCLUDE_FROM_ALL)
endif()

foreach(_part core torch)
  if(TARGET knapformer_${_part})
    install(TARGETS knapformer_${_part} EXPORT knapformer_${_part}
      ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} ${_component}
      FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} ${_component})
    install(EXPORT knapformer_${_part} NAMESPACE knapformer:: FILE knapformer-${_part}.cmake
      DESTINATION ${_package} ${_component})
  endif()
endforeach()
configure_package_config_file(cmake/knapformer-config.cmake.in knapformer-config.cmake
  INSTALL_DESTINATION ${_package} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(knapformer-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/knapformer-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/knapformer-config-version.cmake
  ${PROJECT_SOURCE_DIR}/cmake/FindTorchWheel.cmake DESTINATION ${_package} ${_component})
